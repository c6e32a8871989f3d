"""The socket of an RPC client, and the frames that RPC clients and servers send and take."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.codec import DECODE_FAILURES
from miles_hpc.wire.rpc_client_calls import ClientCalls
from miles_hpc.wire.rpc_messages import Frames
from miles_hpc.wire.rpc_protocol import RpcError, RpcTimeout, RpcUnknownOutcome, RpcUnreachable
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
TICK_S = 0.2
"""How often an open call looks whether the server's address has changed."""
PROMPT_S = 0.0003
"""An answer that comes within this time is waited for awake, if the one before did, too: where cores are idle, to be
woken takes longer than a short call itself."""
_TURN = 100
"""Messages that are taken in one turn."""
# Plain ints: an operation on one of pyzmq's enums costs as much as taking a frame.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


def send_frames(socket: Socket, frames: Frames) -> None:
    """Send without waiting, large frames by reference. Raises zmq.ZMQError when the peer is not there."""
    if len(frames) == 1 and len(frames[0]) < SEND_BY_REFERENCE_FROM:
        socket.send(frames[0], NOBLOCK)
        return
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        socket.send(frame, NOBLOCK_MORE if index < last else NOBLOCK, copy=size < SEND_BY_REFERENCE_FROM)


def receive_frames(socket: Socket) -> Frames:
    """Wait for the frames of the next message, or the rest of them: a header, which is copied, and buffers."""
    frame = socket.recv(copy=False)
    frames: Frames = [frame.bytes]  # the memoryview of a frame costs more than all else here
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


def has_message(socket: Socket) -> bool:
    """Whether a message can be taken at once; to be told by zmq.Again takes twice as long."""
    events = socket.get(_EVENTS)
    assert isinstance(events, int)
    return events & _POLLIN != 0


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
        self._prompt = False
        """Whether the last answer that was waited for came within `PROMPT_S`."""

    def moved_to(self) -> HostAndPort | None:
        """Where the server is, if that is known and the socket is not connected to it."""
        address = self._address()
        return None if address is self._connected or address == self._connected else address

    def connect(self, address: HostAndPort) -> None:
        """Use a new socket to this address."""
        self.close()
        socket = self._context.socket(zmq.DEALER)
        prepare(socket, address)
        prepare_client(socket, self._keys, self._server_key)
        # Open calls bound what is queued, and the caller's deadline bounds how long.
        socket.sndhwm = socket.rcvhwm = 0
        socket.set(zmq.ROUTING_ID, b"R" + secrets.token_bytes(15))
        socket.rcvtimeo = milliseconds(TICK_S)
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
        if self.socket is None:
            return False
        for _ in range(_TURN):
            if not has_message(self.socket):
                return False
            self._take(self.socket)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for a message or an event and handle it; at most about as long as one looks at the address."""
        socket, monitor = self.socket, self.monitor
        if socket is None or monitor is None:
            time.sleep(min(TICK_S, timeout_s))
        elif self.calls.linked and timeout_s >= TICK_S:
            # Straight into the socket; should the connection break, it is seen a tick later.
            began = time.monotonic()
            try:
                if self._prompt:
                    _stay_awake(socket, began + PROMPT_S)
                self._take(socket)
            except zmq.Again:
                self.pump_events()
            self._prompt = time.monotonic() < began + PROMPT_S
        else:
            zmq.zmq_poll([(socket, zmq.POLLIN), (monitor, zmq.POLLIN)], milliseconds(min(TICK_S, timeout_s)))
            self._drain_events(monitor)
            self.pump()

    def _take(self, socket: Socket) -> None:
        """Wait for a message and handle it. Raises zmq.Again when there was none within a tick."""
        frames = receive_frames(socket)
        try:
            self.calls.on_frames(frames)
        except (*DECODE_FAILURES, IndexError) as failure:
            log.warning("a message of the RPC server at %s was dropped: %s", self._connected, failure)

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


def _stay_awake(socket: Socket, deadline: float) -> None:
    """Wait for a message without sleeping, but let all others run first: other threads, ZeroMQ's among them."""
    while not has_message(socket) and time.monotonic() < deadline:
        os.sched_yield()


def descriptor_of(socket: Socket) -> int:
    """What becomes readable when a socket has news; edge-triggered, and any use of the socket may take the edge."""
    descriptor = socket.get(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
