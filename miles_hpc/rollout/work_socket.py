"""The two ends of the `work` port: WorkServer binds in the executor, WorkLink connects in a worker.

Both are plain ZeroMQ sockets in an asyncio loop, and both are unbounded queues by option, because bounded by protocol:
a worker gets as many groups as it has credits, and sends as many as it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from miles_hpc.rollout import work_messages as messages
from miles_hpc.transport.columns import Buffer
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.security import DATA, authenticator, load_client, load_keys, role_keys
from miles_hpc.wire.socket_options import (
    LINK_EVENTS,
    Context,
    Socket,
    bind,
    drain_monitor,
    prepare,
    prepare_client,
    prepare_server,
)

log = logging.getLogger(__name__)

_COPY_BELOW = 64 * 1024
"""Smaller frames are copied into ZeroMQ; larger ones are sent by reference."""
_TURN = 100
"""Messages that are handled before other tasks get a turn."""
_MAX_FRAME = 1 << 31
_AGAIN_S = 0.02
"""Until a send is tried again that found no connection."""
_DOMAIN = "work"


class _Pump:
    """Calls back for each message of a socket, from the running loop."""

    def __init__(self, socket: Socket, on_frames: Callable[[list[memoryview]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._due = False
        descriptor = socket.get(zmq.FD)
        assert isinstance(descriptor, int)
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._turn)
        self._soon()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Raises zmq.ZMQError: EHOSTUNREACH when a ROUTER's peer is gone, EAGAIN when a DEALER has no connection."""
        try:
            for index, frame in enumerate(frames):
                more = zmq.SNDMORE if index < len(frames) - 1 else 0
                self._socket.send(frame, zmq.NOBLOCK | more, copy=memoryview(frame).nbytes < _COPY_BELOW)
        finally:
            # The descriptor is edge-triggered, and a send may take the edge of what has come.
            self._soon()

    def _soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        for _ in range(_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._on_frames([frame.buffer for frame in frames])
        self._soon()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)


class WorkServer:
    """The executor's end.

    Args:
        on_message: called with (peer, message, the parcel that belongs to it or None).

    Raises:
        OSError: the address cannot be bound.
        SecurityError: the keys of the attempt cannot be read.
    """

    def __init__(
        self,
        listen: HostAndPort,
        run_dir: Path,
        attempt: int,
        on_message: Callable[[bytes, messages.ToExecutor, memoryview | None], None],
    ) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._outgoing: dict[bytes, list[msgspec.Raw]] = {}
        self._closed = False
        self.malformed = 0
        context: Context = zmq.Context.instance()
        authenticator(context).allow(_DOMAIN, role_keys(run_dir, attempt, ("worker",)))
        socket: Socket = context.socket(zmq.ROUTER)
        try:
            prepare(socket, listen)
            prepare_server(socket, load_keys(run_dir, attempt, DATA), _DOMAIN)
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.MAXMSGSIZE, _MAX_FRAME)
            socket.sndhwm = socket.rcvhwm = 0
            self.address = bind(socket, listen)
        except BaseException:
            socket.close(linger=0)
            raise
        self._pump = _Pump(socket, self._on_frames)

    def send(self, peer: bytes, message: messages.ToWorker) -> None:
        """Send a message at the end of this turn of the loop, with all others to this peer: a send costs more than what
        is sent. One to a peer that is gone is dropped: its next hello says what it holds, or it is lost."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        # Encoded here, so that what cannot be encoded fails its sender.
        self._outgoing.setdefault(peer, []).append(msgspec.Raw(messages.encode(message)))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for peer, found in outgoing.items():
            if self._closed:
                return
            try:
                self._pump.send([peer, messages.encode(found)])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise

    def _on_frames(self, frames: list[memoryview]) -> None:
        try:
            found = messages.decode_to_executor(frames[1])
        except (msgspec.MsgspecError, IndexError) as error:
            self.malformed += 1
            log.warning("a message on the work port was dropped: %s (%d so far)", error, self.malformed)
            return
        peer, parcels = bytes(frames[0]), iter(frames[2:])
        for message in found:
            follows = isinstance(message, messages.GroupsDone) and message.ref is None
            parcel = next(parcels, None) if follows else None
            self._on_message(peer, message, parcel)

    def close(self) -> None:
        """Release the address; what was not sent is lost."""
        self._closed = True
        self._pump.close()


class WorkLink:
    """A worker's end: one connection to one executor, never reused. After `on_down`, a new link is needed: what was
    under way is lost, and only a hello on a new connection tells both ends what the other has.

    Args:
        on_up: the handshake is done; say hello.
        on_message: called with each message.
        on_down: called once, with the reason, when the connection broke or was refused.

    Raises:
        SecurityError: the keys of the attempt cannot be read.
    """

    def __init__(
        self,
        address: HostAndPort,
        run_dir: Path,
        attempt: int,
        *,
        on_up: Callable[[], None],
        on_message: Callable[[messages.ToWorker], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.address = address
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._closed = False
        self._outgoing: list[tuple[msgspec.Raw, Buffer | None]] = []
        self._loop = asyncio.get_running_loop()
        socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
        prepare(socket, address)
        prepare_client(socket, load_client(run_dir, attempt, "worker"), load_keys(run_dir, attempt, DATA).public)
        socket.set(zmq.ROUTING_ID, b"W" + os.urandom(15))
        socket.set(zmq.MAXMSGSIZE, _MAX_FRAME)
        socket.sndhwm = socket.rcvhwm = 0
        self._socket = socket
        self._monitor: Socket = socket.get_monitor_socket(LINK_EVENTS)
        descriptor = self._monitor.get(zmq.FD)
        assert isinstance(descriptor, int)
        self._monitor_descriptor = descriptor
        self._loop.add_reader(descriptor, self._watch)
        # Until a first read has found nothing, a ZeroMQ socket signals nothing.
        self._loop.call_soon(self._watch)
        socket.connect(address.zmq)
        self._pump = _Pump(socket, self._on_frames)

    def send(self, message: messages.ToExecutor, parcel: Buffer | None = None) -> None:
        """Send a message at the end of this turn of the loop. It is lost when the connection breaks: then `on_down`
        is called."""
        if not self._outgoing and not self._closed:
            self._loop.call_soon(self._flush)
        self._outgoing.append((msgspec.Raw(messages.encode(message)), parcel))

    def _flush(self) -> None:
        if self._closed:
            return
        found = [message for message, _ in self._outgoing]
        parcels = [parcel for _, parcel in self._outgoing if parcel is not None]
        for _ in range(2):
            with contextlib.suppress(zmq.Again):
                self._pump.send([messages.encode(found), *parcels])
                self._outgoing.clear()
                return
            self._socket.get(zmq.EVENTS)  # lets the socket take in a connection that has just come up
        self._loop.call_later(_AGAIN_S, self._flush)

    def _watch(self) -> None:
        if self._closed:
            return
        for event in drain_monitor(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_up()
                continue
            texts: dict[int, str] = {
                zmq.EVENT_DISCONNECTED: "the connection broke",
                zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the executor does not know this process's key",
            }
            text = texts.get(event, "what listens there ended the handshake: it is no executor of this attempt")
            self.close()
            self._on_down(f"{self.address.netloc}: {text}")
            return

    def _on_frames(self, frames: list[memoryview]) -> None:
        try:
            found = messages.decode_to_worker(frames[0])
        except msgspec.MsgspecError as error:
            log.warning("a message of the executor was dropped: %s", error)
            return
        for message in found:
            if not self._closed:
                self._on_message(message)

    def close(self) -> None:
        """Close without waiting; what was not sent is lost."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._monitor_descriptor)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._pump.close()
