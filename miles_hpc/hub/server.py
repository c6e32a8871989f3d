"""The hub's I/O shell: bytes become events, actions become bytes and files, and nothing else happens here."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq

from miles_hpc.hub import dump, journal, views
from miles_hpc.hub.actions import (
    Action,
    Event,
    HubBroke,
    HubSignalled,
    Leave,
    Note,
    Received,
    Send,
    ShowDump,
    ShowEvents,
    Tick,
    VerdictWritten,
)
from miles_hpc.hub.actions import WriteVerdict as Verdict
from miles_hpc.hub.eventlog import EventLog
from miles_hpc.hub.http import HubHttp
from miles_hpc.hub.site import Site, SiteSeen, SiteWatch
from miles_hpc.hub.state import HubState
from miles_hpc.hub.verdict import FileWriter
from miles_hpc.wire.hub_sockets import HubSockets
from miles_hpc.wire.messages import Done, DumpReply, EventsReply, Failed
from miles_hpc.wire.program import stop_signals
from miles_hpc.wire.socket_options import milliseconds

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Longest time between two looks at the clock; all deadlines of the hub are seconds, and longer in a large fleet."""
TURN_S = 0.002
"""Shortest time between two turns of the loop."""
DRAIN_LIMIT = 512
"""Messages that are handled before the clock is looked at again."""
COUNTERS_EVERY_S = 10.0
_WAKE = b"\x01"


class HubServer:
    """Runs a HubState on a socket until the state says Leave.

    Args:
        state: built with `clock()` as its start.
        site: who lends the nodes; None for a run on one machine.
        http: is shown each status; the caller closes it.
        clock: the monotonic clock, in seconds.
    """

    def __init__(
        self,
        state: HubState,
        socket: HubSockets,
        event_log: EventLog,
        run_dir: Path,
        *,
        site: Site | None = None,
        http: HubHttp | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._socket, self._log, self._clock = state, socket, event_log, clock
        core = state.core
        self._http = http
        self._status_interval = core.timing.status_interval
        # One pipe wakes the poll for what does not come over the network: a verdict that is durable, a signal.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._verdict_result: bool | OSError | None = None
        self._signalled = ""
        self._last_counters: dict[str, int] = {}
        self._next_status = clock()
        self._journal = b""
        self._journal_path = journal.journal_path(run_dir, core.info.attempt, core.info.epoch)
        self._seen: SiteSeen | None = None
        after_verdict = site.on_verdict if site is not None else lambda: None
        self._files = FileWriter(run_dir, core.info.attempt, self._on_verdict, after_verdict, self._on_kept)
        self._unkept: deque[tuple[int, Send]] = deque()
        """Answers that wait for the journal, each with the ticket of the one that it needs."""
        self._ticket = 0
        self._kept: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._site = SiteWatch(site, self._on_seen) if site is not None else None
        self._left = False
        self.verdict_delivered = False

    # ------------------------------------------------------------------------------------- other threads
    def _on_verdict(self, result: bool | OSError) -> None:
        self._verdict_result = result
        self._wake()

    def _on_kept(self, ticket: int, error: str) -> None:
        self._kept.put((ticket, error))
        self._wake()

    def _on_seen(self, seen: SiteSeen) -> None:
        self._seen = seen
        self._wake()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = signal.Signals(number).name

    def _wake(self) -> None:
        # A full pipe means that the loop is awake already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, _WAKE)

    # ---------------------------------------------------------------------------------------------- loop
    def run(self) -> None:
        """Serve until every agent has left after the verdict. The caller closes the socket."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        poller = zmq.Poller()
        for socket in self._socket.pollable:
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        more = False
        last_turn = -TURN_S
        next_tick = next_counters = self._clock()
        try:
            while not self._left:
                poller.poll(milliseconds(0.0 if more else next_tick - self._clock()))
                # In a large fleet a message comes every 0.2 ms, and waking up costs more than the message: what follows
                # close on the last turn is collected first. The first one after a silence is handled at once.
                if not more and (early := last_turn + TURN_S - self._clock()) > 0:
                    time.sleep(early)
                last_turn = self._clock()
                received = self._socket.drain(DRAIN_LIMIT)
                more = len(received) == DRAIN_LIMIT
                for peer, _role, message in received:
                    self._apply(Received(peer, message))
                if received:
                    self._socket.drain(0)  # the receipts: all of it is handled now
                self._take_wakeups()
                self._keep_decisions()
                now = self._clock()
                if now >= next_tick:
                    scale = self._state.core.heartbeat_scale()
                    next_tick = now + TICK_S * scale
                    # Agents of a large fleet take a hub for lost after three of its longer intervals.
                    self._socket.answer_every(2 if scale > 1 else 1)
                    self._apply(Tick())
                    if self._site is not None:
                        self._site.ask_about(self._state.core.lost_hosts())
                if now >= self._next_status:
                    self._next_status = now + self._status_interval * self._state.core.heartbeat_scale()
                    self._write_files()
                if now >= next_counters:
                    next_counters = now + COUNTERS_EVERY_S
                    self._log_counters()
            self._socket.drain(0)
            self._write_files()
        finally:
            signal.set_wakeup_fd(-1)
            self._files.close()
            self._answer_kept()
            if self._site is not None:
                self._site.close()
            self._log_counters()
            os.close(self._wake_read)
            # The write end stays open: a writer thread that a stalled file system holds up may still report.

    def _write_files(self) -> None:
        core, wall = self._state.core, time.time()
        core.dropped = {name: count for name, count in self._counters().items() if count}
        status = views.status_object(core, wall)
        self._files.write_status(status)
        if self._http is not None:
            self._http.show(status, self._counters())
        if not core.recovering and not core.cleans_up:
            content = msgspec.json.encode(journal.take(core, wall))
            if content != self._journal:
                self._journal = content
                self._files.write_journal(self._journal_path, content)

    def _keep_decisions(self) -> None:
        """Have the journal of now on disk for the answers that need it."""
        if self._unkept and self._unkept[-1][0] > self._ticket:
            self._ticket += 1
            self._journal = msgspec.json.encode(journal.take(self._state.core, time.time()))
            self._files.write_journal(self._journal_path, self._journal, self._ticket)

    def _answer_kept(self) -> None:
        """Send the answers whose journal is on disk; or say that it is not."""
        while not self._kept.empty():
            kept, error = self._kept.get()
            while self._unkept and self._unkept[0][0] <= kept:
                _, answer = self._unkept.popleft()
                message = answer.message
                if error and isinstance(message, Done):
                    text = f"carried out, but a hub that takes over will not know of it: {error}"
                    message = Failed(call_id=message.call_id, text=text)
                self._socket.send(answer.peer, message)

    def _take_wakeups(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        signalled, self._signalled = self._signalled, ""
        if signalled:
            self._apply(HubSignalled(signalled))
        seen, self._seen = self._seen, None
        if seen is not None:
            self._apply(seen)
        self._answer_kept()
        result, self._verdict_result = self._verdict_result, None
        if isinstance(result, OSError):
            self._log.write("verdict_failed", "error", reason=str(result))
        elif result is not None:
            self.verdict_delivered = True
            if not result:
                self._log.write("verdict_exists", "warning", attempt=self._state.core.info.attempt)
        if result is not None:
            self._apply(VerdictWritten())

    def _apply(self, event: Event) -> None:
        try:
            actions = self._state.apply(event, self._clock())
        except Exception as error:
            if isinstance(event, HubBroke):
                raise
            log.exception("the reaction to %s failed", event)
            actions = []
            self._apply(HubBroke(f"{type(error).__name__}: {error}"))
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Send(peer, message, kept):
                if kept:
                    self._unkept.append((self._ticket + 1, action))
                else:
                    self._socket.send(peer, message)
            case Note(event, fields, level):
                self._log.write(event, level, **fields)
            case ShowEvents(peer, call_id, since, limit):
                events, following = self._log.recent(since, limit)
                self._socket.send(peer, EventsReply(call_id=call_id, events=events, next=following))
            case ShowDump(peer, call_id):
                self._socket.send(peer, DumpReply(call_id=call_id, content=self._dump()))
            case Verdict():
                self._files.write_verdict(action)
                self._next_status = self._clock()
            case Leave():
                self._left = True

    def _counters(self) -> dict[str, int]:
        """What did not get through."""
        c = self._socket.counters
        return {
            "malformed": c.malformed,
            "forbidden": c.forbidden,
            "unroutable": c.unroutable,
            "oversized": c.oversized,
            "queue_full": c.full,
            "denied": self._socket.denied,
            "status_failures": self._files.status_failures,
            "log_lines_dropped": self._log.dropped,
        }

    def _log_counters(self) -> None:
        """Say them when they have changed."""
        counters = self._counters()
        if counters != self._last_counters and any(counters.values()):
            self._log.write("counters", "info", **counters)
        self._last_counters = counters

    def _dump(self) -> dict[str, Any]:
        return {"counters": self._counters(), **dump.process(), **dump.state(self._state)}
