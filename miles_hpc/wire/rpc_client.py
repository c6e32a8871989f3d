"""Callers of a CURVE RPC server: RpcClient for asyncio, SyncRpcClient for a plain thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.codec import DECODE_FAILURES, Buffer
from miles_hpc.wire.rpc_protocol import (
    ClientCalls,
    Frames,
    Outcome,
    RpcError,
    RpcTimeout,
    RpcUnknownOutcome,
    RpcUnreachable,
)
from miles_hpc.wire.security import DATA, Role, load_client, load_keys
from miles_hpc.wire.socket_options import (
    LINK_EVENTS,
    Context,
    Socket,
    drain_monitor,
    milliseconds,
    prepare,
    prepare_client,
)

log = logging.getLogger(__name__)

Address: TypeAlias = "HostAndPort | Callable[[], HostAndPort | None]"

SEND_BY_REFERENCE_FROM = 64 * 1024
"""Bytes from which a frame is handed to ZeroMQ without a copy."""
_TICK_S = 0.2
"""How often an open call looks whether the server's address has changed."""
# Plain ints: an operation on one of pyzmq's enums costs as much as taking a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def send_frames(socket: Socket, frames: Frames) -> None:
    """Send without waiting, large frames by reference. Raises zmq.ZMQError when the peer is not there."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        socket.send(frame, _NOBLOCK_MORE if index < last else _NOBLOCK, copy=size < SEND_BY_REFERENCE_FROM)


def receive_frames(socket: Socket, flags: int = _NOBLOCK) -> list[zmq.Frame]:
    """The frames of the next message. Raises zmq.Again when there is none."""
    frames = [frame := socket.recv(flags, copy=False)]
    while frame.more:
        frames.append(frame := socket.recv(copy=False))
    return frames


class RpcLink:
    """The socket of one client and the state of its calls; `pump` handles what has come, and never waits."""

    def __init__(self, address: Address, run_dir: Path, attempt: int, role: Role, context: Context | None) -> None:
        self._address = address if callable(address) else lambda: address
        self._keys = load_client(run_dir, attempt, role)
        self._server_key = load_keys(run_dir, attempt, DATA).public
        self._context = context or zmq.Context.instance()
        self._name = secrets.token_bytes(16)
        self._connected: HostAndPort | None = None
        self._trouble = ""
        self.calls = ClientCalls(self._name, self._send)
        self.socket: Socket | None = None
        self.monitor: Socket | None = None
        self._news = select.poll()

    def moved_to(self) -> HostAndPort | None:
        """Where the server is, if that is known and the socket is not connected to it."""
        address = self._address()
        return None if address == self._connected else address

    def connect(self, address: HostAndPort) -> None:
        """Use a new socket to this address."""
        self.close()
        socket = self._context.socket(zmq.DEALER)
        prepare(socket, address)
        prepare_client(socket, self._keys, self._server_key)
        # Open calls bound what is queued, and the caller's deadline bounds how long.
        socket.sndhwm = socket.rcvhwm = 0
        socket.set(zmq.ROUTING_ID, b"R" + secrets.token_bytes(15))
        socket.rcvtimeo = milliseconds(_TICK_S)
        self.monitor = socket.get_monitor_socket(LINK_EVENTS)
        self._news = select.poll()
        self._news.register(descriptor_of(self.monitor), select.POLLIN)
        drain_monitor(self.monitor)  # ZeroMQ wakes only a reader that has found nothing before
        socket.connect(address.zmq)
        self.socket = socket
        self._connected = address

    def pump_events(self) -> None:
        """Handle what the monitor reports."""
        if self.monitor is not None and self._news.poll(0):
            self._drain_events(self.monitor)

    def _drain_events(self, monitor: Socket) -> None:
        for event in drain_monitor(monitor):
            self._on_event(event)

    def pump(self) -> bool:
        """Handle events and messages; True when the limit of one turn was reached and more may wait."""
        self.pump_events()
        return self.socket is not None and all(self._take(self.socket, _NOBLOCK) for _ in range(100))

    def wait(self, timeout_s: float) -> None:
        """Wait for a message or an event and handle it; at most about as long as one looks at the address."""
        socket, monitor = self.socket, self.monitor
        if socket is None or monitor is None:
            time.sleep(min(_TICK_S, timeout_s))
        elif self.calls.linked and timeout_s >= _TICK_S:
            # Straight into the socket; should the connection break, it is seen a tick later.
            if not self._take(socket, 0):
                self.pump_events()
        else:
            zmq.zmq_poll([(socket, zmq.POLLIN), (monitor, zmq.POLLIN)], milliseconds(min(_TICK_S, timeout_s)))
            self._drain_events(monitor)
            self.pump()

    def _take(self, socket: Socket, flags: int) -> bool:
        """Handle one message. False: there is none."""
        try:
            frames = receive_frames(socket, flags)
        except zmq.Again:
            return False
        try:
            self.calls.on_frames([frame.buffer for frame in frames])
        except (*DECODE_FAILURES, IndexError) as failure:
            log.warning("a message of the RPC server at %s was dropped: %s", self._connected, failure)
        return True

    def expired(self, call: int, method: str, timeout_s: float) -> RpcError:
        """Give up a call and say why it did not end in time."""
        sent = self.calls.was_sent(call)
        self.calls.abandon(call)
        where = self._connected.netloc if self._connected else "an address that is not known yet"
        text = f"call {method!r} to {where} was not answered within {timeout_s:g} s"
        if self.calls.linked:
            return RpcTimeout(text)
        if sent:
            return RpcUnknownOutcome(f"{text}: the connection broke after it was sent")
        return RpcUnreachable(f"{text}: {self._trouble or 'nobody accepted the connection'}")

    def close(self) -> None:
        """Close the sockets; open calls stay open."""
        self.calls.on_down()
        if self.socket is not None and self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)
        self.socket = self.monitor = None
        self._connected = None

    def _send(self, frames: Frames) -> None:
        # A send fails only while the connection is down; then the call is repeated after the next hello.
        if self.socket is None:
            return
        try:
            send_frames(self.socket, frames)
        except zmq.Again:
            self.socket.get(zmq.EVENTS)  # lets the socket take in a connection that has just come up
            with contextlib.suppress(zmq.Again):
                send_frames(self.socket, frames)

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._trouble = "the server accepted the connection but did not answer the hello"
            self.calls.on_up()
            return
        self.calls.on_down()
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._trouble = "the server does not know this process's key"
        elif event != zmq.EVENT_DISCONNECTED:
            self._trouble = "the server ended the handshake: it is of another run or attempt, or no RPC server"


def descriptor_of(socket: Socket) -> int:
    """What becomes readable when a socket has news; edge-triggered, and any use of the socket may take the edge."""
    descriptor = socket.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


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
        self._wake_by(loop, min(deadline, loop.time() + _TICK_S))
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
            self._wake_by(loop, min(*left, now + _TICK_S))
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
        with self._lock:
            outcomes: list[Outcome] = []
            self._follow()
            self._link.pump_events()
            call = self._link.calls.begin(method, params, list(frames), outcomes.append, idempotent=idempotent)
            try:
                self._link.calls.flush()
                while not outcomes:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._link.expired(call, method, timeout_s)
                    self._link.wait(left)
                    if not outcomes:
                        self._follow()
            finally:
                self._link.calls.abandon(call)
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
