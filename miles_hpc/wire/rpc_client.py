"""Callers of a CURVE RPC server: RpcClient for asyncio, SyncRpcClient for a plain thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from miles_hpc.wire.codec import Buffer
from miles_hpc.wire.rpc_client_calls import Outcome
from miles_hpc.wire.rpc_link import TICK_S, Address, RpcLink, descriptor_of
from miles_hpc.wire.rpc_protocol import RpcUnreachable
from miles_hpc.wire.security import Role
from miles_hpc.wire.socket_options import Context


class _Waiting(NamedTuple):
    """A call of an RpcClient that is open."""

    future: asyncio.Future[Outcome]
    method: str
    timeout_s: float
    deadline: float


class RpcClient:
    """Calls methods of one RPC server from one event loop.

    The server may move or restart: `address` is asked again, and a call waits for it within its own deadline. A call
    that an earlier incarnation of the server got and did not answer ends with RpcUnknownOutcome.

    Args:
        address: of the server, or a function that returns it, None while it is not known.
        role: whose key is used; own programs are `worker`.

    Raises:
        SecurityError: when the keys of the attempt cannot be read.
    """

    def __init__(
        self,
        address: Address,
        run_dir: Path,
        attempt: int,
        *,
        role: Role = "worker",
        context: Context | None = None,
    ) -> None:
        self._link = RpcLink(address, run_dir, attempt, role, context)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: list[int] = []
        self._waiting: dict[int, _Waiting] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._turn_due = False
        self._closed = False

    async def __aenter__(self) -> RpcClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        frames: Iterable[Buffer] = (),
        timeout_s: float,
        idempotent: bool = False,
    ) -> Any:
        """Call and return the handler's value. Arguments and errors as `call_frames`."""
        return (await self.call_frames(method, params, frames=frames, timeout_s=timeout_s, idempotent=idempotent))[0]

    async def call_frames(
        self,
        method: str,
        params: Any = None,
        *,
        frames: Iterable[Buffer] = (),
        timeout_s: float,
        idempotent: bool = False,
    ) -> tuple[Any, list[memoryview]]:
        """Call and return the handler's value and buffers.

        Args:
            params: msgpack types.
            frames: raw buffers, not copied when large: they must not change until the call has returned.
            idempotent: a server that replaced the one that got the call may run it again.

        Raises:
            RpcTimeout: the server has the call and did not answer within `timeout_s`.
            RpcUnreachable: no server could be reached.
            RpcUnknownOutcome: the server that got the call was lost, or replaced and the call is not idempotent.
            RpcRemoteError: the handler raised.
        """
        if self._closed:
            raise RpcUnreachable(f"call {method!r}: this client is closed")
        self._loop = loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._follow()
        self._link.pump_events()  # a call to a connection that is known to be gone would end as unknown
        call = self._link.calls.begin(
            method, params, list(frames), lambda outcome: _settle(future, outcome), idempotent=idempotent
        )
        deadline = loop.time() + timeout_s
        self._waiting[call] = _Waiting(future, method, timeout_s, deadline)
        self._wake_by(loop, min(deadline, loop.time() + TICK_S))
        self._turn_soon()
        try:
            outcome = await future
        finally:
            del self._waiting[call]
            self._link.calls.abandon(call)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value, outcome.frames

    async def close(self) -> None:
        """Close the socket; open calls end with RpcUnreachable."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._unwatch()
        self._link.calls.fail_all(RpcUnreachable("the client was closed"))
        self._link.close()

    def _follow(self) -> None:
        """Move to a changed address."""
        # The old descriptor must leave the loop before its socket closes and the number is used again.
        if (address := self._link.moved_to()) is not None:
            self._unwatch()
            self._link.connect(address)
            self._watch()
            self._turn_soon()

    def _wake_by(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """One alarm for all open calls: for the first that expires, and to look at the address."""
        if self._alarm is None or self._alarm.when() > when:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_at(when, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        loop = self._require_loop()
        now = loop.time()
        for call, waiting in self._waiting.items():
            if waiting.deadline <= now:
                error = self._link.expired(call, waiting.method, waiting.timeout_s)
                _settle(waiting.future, Outcome(None, [], error))
        if left := [waiting.deadline for waiting in self._waiting.values() if not waiting.future.done()]:
            self._wake_by(loop, min(*left, now + TICK_S))
            self._follow()
        self._link.calls.flush(acknowledge=True)
        self._turn_soon()

    def _watch(self) -> None:
        loop = self._require_loop()
        for socket in (self._link.socket, self._link.monitor):
            assert socket is not None
            descriptor = descriptor_of(socket)
            loop.add_reader(descriptor, self._turn)
            self._watched.append(descriptor)

    def _unwatch(self) -> None:
        for descriptor in self._watched:
            self._require_loop().remove_reader(descriptor)
        self._watched.clear()

    def _turn_soon(self) -> None:
        # A ZeroMQ descriptor is edge-triggered, and any send may take the edge: so after a send, look.
        if not self._turn_due:
            self._turn_due = True
            self._require_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Send what this turn of the loop has begun, all at once, and take what has come."""
        self._turn_due = False
        if self._closed:
            return
        self._link.calls.flush()
        if self._link.pump():
            self._turn_soon()

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


class SyncRpcClient:
    """The same calls for plain threads: one at a time, the socket is used in the calling thread.

    Args and errors as RpcClient.
    """

    def __init__(
        self,
        address: Address,
        run_dir: Path,
        attempt: int,
        *,
        role: Role = "worker",
        context: Context | None = None,
    ) -> None:
        self._link = RpcLink(address, run_dir, attempt, role, context)
        self._lock = threading.Lock()

    def __enter__(self) -> SyncRpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        method: str,
        params: Any = None,
        *,
        frames: Iterable[Buffer] = (),
        timeout_s: float,
        idempotent: bool = False,
    ) -> Any:
        """Call and return the handler's value. Arguments and errors as `RpcClient.call_frames`."""
        return self.call_frames(method, params, frames=frames, timeout_s=timeout_s, idempotent=idempotent)[0]

    def call_frames(
        self,
        method: str,
        params: Any = None,
        *,
        frames: Iterable[Buffer] = (),
        timeout_s: float,
        idempotent: bool = False,
    ) -> tuple[Any, list[memoryview]]:
        """Call and return the handler's value and buffers. Arguments and errors as `RpcClient.call_frames`."""
        deadline = time.monotonic() + timeout_s
        link = self._link
        with self._lock:
            outcomes: list[Outcome] = []
            self._follow()
            link.pump_events()
            call = link.calls.begin(method, params, list(frames), outcomes.append, idempotent=idempotent)
            try:
                link.calls.flush()
                while True:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise link.expired(call, method, timeout_s)
                    link.wait(left)
                    if outcomes:
                        break
                    self._follow()
            except BaseException:
                link.calls.abandon(call)
                raise
        outcome = outcomes[0]
        if outcome.error is not None:
            raise outcome.error
        return outcome.value, outcome.frames

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self._link.close()

    def _follow(self) -> None:
        if (address := self._link.moved_to()) is not None:
            self._link.connect(address)
