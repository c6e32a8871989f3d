"""HubClient: how a program of ours knows the address book and talks to the hub."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket as os_socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from miles_hpc.config.timing import Timing
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    ClientHeartbeat,
    ClientHello,
    ClientWelcome,
    Done,
    Draining,
    FinishRun,
    HoldCells,
    Message,
    PoolAddrs,
    Progress,
    Refused,
    ReplaceCell,
    Superseded,
)
from miles_hpc.wire.rendezvous import RendezvousError, newest, wait_for_rendezvous
from miles_hpc.wire.security import load_client
from miles_hpc.wire.socket_options import milliseconds
from miles_hpc.wire.sockets import HubError, HubLink, HubRefused, HubUnreachable, connect_hub
from miles_hpc.wire.waiting import Doorbell, Pools, Wait, WaitTimeout
from miles_hpc.wire.worker_env import WorkerEnv

__all__ = ["HubClient", "HubError", "Pools", "WaitTimeout", "exit_at_once"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_FOR_HUB_EVERY_S = 0.5
"""How often the rendezvous directory is read while the hub is lost."""
_CONNECT_TRY_S = 5.0
_RECONNECT_TRY_S = 3.0
_LOOK_AGAIN_S = 10.0
_QUIET_HUB_S = 3.0
"""Silence after which a newer hub is looked for although the connection stands."""


def exit_at_once(reason: str) -> None:
    """The default reaction to a lost or superseding hub: this process must not go on."""
    log.critical("leaving at once: %s", reason)
    logging.shutdown()
    os._exit(1)


class HubClient:
    """A link to the hub, kept by one background thread; usable from sync and async code of any thread.

    The thread sends heartbeats, follows a hub that restarted with a higher epoch, repeats what that hub may have
    missed, and calls `on_fatal(reason)` when the hub says that this generation is superseded or was silent for
    `timing.fence`.

    Args:
        env: identity of this worker.
        timing: heartbeat and fence are used.
        on_fatal: called once, in the client's thread; the default ends the process.

    Raises:
        SecurityError: when the worker key of the attempt cannot be read.
    """

    def __init__(
        self, env: WorkerEnv, *, timing: Timing | None = None, on_fatal: Callable[[str], None] = exit_at_once
    ) -> None:
        self._env = env
        self._timing = timing or Timing()
        self._on_fatal = on_fatal
        self._changed = threading.Condition()
        self._book = PoolAddrs(revision=-1, pools={})
        self._welcome = ClientWelcome(epoch=0, run_id="", attempt=env.attempt)
        self._ended = ""
        self._draining: Draining | None = None
        self._drain_until = 0.0
        self._callbacks: list[Callable[[Pools], None]] = []
        self._progress: Progress | None = None
        self._progress_sent = True
        self._unacknowledged: dict[str, Message] = {}
        self._sent: set[str] = set()
        self._greeted = False
        self._keys = load_client(env.run_dir, env.attempt, "worker")
        self._stopping = threading.Event()
        self._wake_in, self._wake_out = os_socket.socketpair()
        self._wake_in.setblocking(False)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HubClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ life
    def start(self, timeout_s: float = 30.0) -> None:
        """Find the hub and say hello; returns when it has welcomed this worker.

        Raises:
            HubError: a subclass that names why (unreachable, wrong key, wrong hub, refused).
            RendezvousError: when no hub was published in time, or one of another run.
        """
        deadline = time.monotonic() + timeout_s
        link = self._connect_first(deadline)
        self._thread = threading.Thread(target=self._run, args=(link,), name="hub-client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the hub. Waits for the thread; calls that wait end with HubError."""
        self._stopping.set()
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._wake_in.close()
            self._wake_out.close()
        self._end("the client was closed")

    # ------------------------------------------------------------------------------------------ address book
    @property
    def env(self) -> WorkerEnv:
        """Identity of this worker."""
        return self._env

    @property
    def pools(self) -> Pools:
        """Pool id -> living cells in cell order. Replaced as a whole, never changed in place."""
        return self._book.pools

    @property
    def revision(self) -> int:
        """Of the address book within the hub's epoch; -1 before the first."""
        return self._book.revision

    @property
    def healed(self) -> int:
        """Cells started again so far in this attempt."""
        return self._book.healed

    @property
    def epoch(self) -> int:
        """Of the hub that last welcomed this worker."""
        return self._welcome.epoch

    @property
    def run_id(self) -> str:
        """As the hub said in its welcome."""
        return self._welcome.run_id

    @property
    def draining(self) -> Draining | None:
        """Set once the run drains; callbacks of `on_change` are called then."""
        return self._draining

    def drain_left(self) -> float | None:
        """Seconds until the hub stops everything; None while the run does not drain."""
        return None if self._draining is None else max(0.0, self._drain_until - time.monotonic())

    async def async_until_drained(self) -> None:
        """Returns once the run drains, or the client has ended."""
        with Doorbell(self.on_change) as doorbell:
            while self._draining is None and not self._ended:
                await doorbell.wait(_LOOK_AGAIN_S)

    def wait_for(self, predicate: Callable[[Pools], T | None], what: str, timeout_s: float) -> T:
        """Wait until `predicate(pools)` gives something other than None or False, and return it.

        Args:
            what: names in progress lines and in the error what is waited for.

        Raises:
            WaitTimeout: after `timeout_s`.
            HubError: when the client was closed or lost its hub.
        """
        wait = Wait(what, timeout_s)
        with self._changed:
            while True:
                found = predicate(self.pools)
                if found is not None and found is not False:
                    return found
                self._changed.wait(wait.pause(self.pools, self._ended))

    async def async_wait_for(self, predicate: Callable[[Pools], T | None], what: str, timeout_s: float) -> T:
        """`wait_for` for coroutines; the predicate runs in the caller's loop."""
        wait = Wait(what, timeout_s)
        with Doorbell(self.on_change) as doorbell:
            while True:
                found = predicate(self.pools)
                if found is not None and found is not False:
                    return found
                await doorbell.wait(wait.pause(self.pools, self._ended))

    async def async_changes(self) -> AsyncIterator[Pools]:
        """The address book now, and after each change; revisions in between may be skipped.

        Ends when the client is closed.
        """
        seen: Pools | None = None
        with Doorbell(self.on_change) as doorbell:
            while not self._ended:
                if self.pools is not seen:
                    seen = self.pools
                    yield seen
                else:
                    await doorbell.wait(_LOOK_AGAIN_S)

    def on_change(self, callback: Callable[[Pools], None]) -> Callable[[], None]:
        """Call back in the client's thread after each change, and once when the client ends; must not block.

        Returns:
            A function that takes the callback out again.
        """
        with self._changed:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._changed:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return remove

    # ------------------------------------------------------------------------------------------ messages
    def progress(self, progress: Progress) -> None:
        """Tell the hub how far the run is; the last one is repeated to a new hub. Does not wait."""
        with self._changed:
            self._progress = progress
            self._progress_sent = False
        self._wake()

    def finish(
        self,
        outcome: Literal["finished", "failed", "drained"],
        reason: str = "",
        summary: dict[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """End the run; returns after the hub has it.

        Raises:
            WaitTimeout: when no hub acknowledged it in time.
            HubError: when the client was closed or lost its hub.
        """
        call_id = secrets.token_hex(8)
        message = FinishRun(outcome=outcome, reason=reason, summary=summary or {}, call_id=call_id)
        self._post(call_id, message)
        wait = Wait("the hub to take the end of the run", timeout_s)
        with self._changed:
            while call_id in self._unacknowledged:
                self._changed.wait(wait.pause(self.pools, self._ended))

    def replace_cell(self, cell: str, generation: Generation, reason: str) -> None:
        """Tell the hub that this generation of a cell is of no use. Does not wait; repeated until a hub has it."""
        call_id = secrets.token_hex(8)
        self._post(call_id, ReplaceCell(cell=cell, generation=generation, reason=reason, call_id=call_id))

    def hold_cells(self, cells: Mapping[str, Generation], seconds: float) -> None:
        """Ask the hub to stop none of these generations for an operator until `seconds` passed; 0 releases them."""
        call_id = secrets.token_hex(8)
        self._post(call_id, HoldCells(cells=dict(cells), seconds=seconds, call_id=call_id))

    def _post(self, call_id: str, message: Message) -> None:
        with self._changed:
            self._unacknowledged[call_id] = message
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes as well, and a closed client has nothing to do
            self._wake_in.send(b"\0")

    # ------------------------------------------------------------------------------------------ the thread
    def _hello(self) -> ClientHello:
        return ClientHello(worker=self._env.worker, generation=self._env.generation, pid=os.getpid())

    def _connect_first(self, deadline: float) -> HubLink:
        env = self._env
        while True:
            # Read each time: a hub that died right after it published is followed by one with a higher epoch.
            found = wait_for_rendezvous(env.run_dir, env.attempt, deadline)
            left = max(0.0, deadline - time.monotonic())
            try:
                link, answer = connect_hub(found, self._keys, self._hello(), timeout_s=min(left, _CONNECT_TRY_S))
            except HubUnreachable:
                if time.monotonic() >= deadline:
                    raise
                log.info("the hub of epoch %d does not answer yet", found.epoch)
                continue
            if reason := self._take(answer):
                link.close()
                raise HubRefused("superseded", reason)
            return link

    def _run(self, link: HubLink) -> None:
        reason = ""
        try:
            while not reason and not self._stopping.is_set():
                reason, link = self._serve(link)
        except HubRefused as refusal:
            reason = str(refusal)
        except Exception as failure:
            log.exception("the hub client broke")
            reason = f"the hub client broke: {failure}"
        finally:
            link.close()
        if reason:
            self._end(reason)
            self._on_fatal(reason)

    def _serve(self, link: HubLink) -> tuple[str, HubLink]:
        """Use a link until it ends: a reason to leave ("" when closed), or the link to a newer hub."""
        poller = zmq.Poller()
        for source in (link.socket, link.monitor, self._wake_out):
            poller.register(source, zmq.POLLIN)
        up, looked, beat, seq = True, 0.0, 0.0, 0
        while not self._stopping.is_set():
            pause = beat + self._timing.heartbeat - time.monotonic() if up else _LOOK_FOR_HUB_EVERY_S
            ready = dict(poller.poll(milliseconds(pause)))
            if self._wake_out.fileno() in ready:
                self._wake_out.recv(4096)
            for event in link.events():
                up = event.kind == "up"
                if up:
                    link.send(self._hello())
                else:
                    self._greeted = False
                    log.warning("%s", event.text)
            for message in link.receive():
                if reason := self._take(message):
                    return reason, link
            if up and time.monotonic() - beat >= self._timing.heartbeat:
                beat, seq = time.monotonic(), seq + 1
                link.send(ClientHeartbeat(seq=seq))
            if up:
                self._flush(link)
            silent = link.silent_for()
            if silent > self._timing.fence:
                return f"no hub was heard for {silent:.0f} s (timing.fence = {self._timing.fence:g} s)", link
            if (not up or silent > _QUIET_HUB_S) and time.monotonic() - looked >= _LOOK_FOR_HUB_EVERY_S:
                newer = self._find_newer()
                looked = time.monotonic()
                if newer is not None:
                    link.close()
                    return "", newer
        return "", link

    def _find_newer(self) -> HubLink | None:
        """A link to a hub of a higher epoch, if there is one and it takes us."""
        try:
            found = newest(self._env.run_dir, self._env.attempt, self.run_id)
            if found is None or found.epoch <= self.epoch:
                return None
            link, answer = connect_hub(found, self._keys, self._hello(), timeout_s=_RECONNECT_TRY_S)
        except (HubError, RendezvousError, OSError) as failure:
            if isinstance(failure, HubRefused) and failure.code == "superseded":
                raise
            log.warning("looking for a newer hub: %s", failure)
            return None
        if reason := self._take(answer):
            link.close()
            raise HubRefused("superseded", reason)
        return link

    def _take(self, message: Message) -> str:
        """Handle a message of the hub; the result is a reason to leave, or empty."""
        if isinstance(message, ClientWelcome):
            with self._changed:
                if message.epoch != self.epoch:
                    log.info("welcomed by the hub of epoch %d", message.epoch)
                    self._book = msgspec.structs.replace(self._book, revision=-1)
                self._welcome = message
                self._greeted = True
                self._progress_sent = self._progress is None
                self._sent.clear()
        elif isinstance(message, PoolAddrs):
            if message.revision > self.revision:
                self._set_book(message)
        elif isinstance(message, Done):
            with self._changed:
                self._unacknowledged.pop(message.call_id, None)
                self._changed.notify_all()
        elif isinstance(message, Draining):
            log.warning("the run drains within %.0f s: %s", message.deadline_s, message.reason)
            self._drain_until = time.monotonic() + message.deadline_s
            self._draining = message
            self._tell()
        elif isinstance(message, Superseded):
            return f"superseded: {message.reason}"
        elif isinstance(message, Refused):
            if message.code == "superseded":
                return f"superseded: {message.text}"
            log.error("the hub refused a message (%s): %s", message.code, message.text)
        else:
            log.error("the hub sent a %s, which is not for programs", type(message).__name__)
        return ""

    def _flush(self, link: HubLink) -> None:
        """Send what the greeted hub has not been sent yet."""
        with self._changed:
            if not self._greeted:
                return
            if not self._progress_sent and self._progress is not None:
                self._progress_sent = link.send(self._progress)
            for call_id, message in self._unacknowledged.items():
                if call_id not in self._sent and link.send(message):
                    self._sent.add(call_id)

    def _set_book(self, book: PoolAddrs) -> None:
        with self._changed:
            self._book = book
        self._tell()

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback(self.pools)
            except Exception:
                log.exception("a callback on the address book failed")
