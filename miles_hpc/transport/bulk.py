"""Parcels between nodes: the consumer pulls parts of 1 MiB on credits, and goes on from the last one after a break.

The connection is plain TCP: bulk frames are neither encrypted nor signed, which costs two thirds of the throughput.
Who may pull is decided when a connection is made: the server sends a nonce, the client answers with its HMAC under a
key that it was told over the encrypted RPC. Whoever can read or change the network between the nodes can read or change
the parcels; on a network that is not trusted, keep ranks on the executor's node or use an encrypted overlay.

Frames, client to server: `hello`; `proof`, hmac; `pull`, parcel, from, credits; `credit`, parcel, more.
Server to client: `nonce`, nonce; `welcome`; `refused`; `part`, parcel, number, bytes; `gone`, parcel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.socket_options import Context, Socket, bind, milliseconds, prepare

log = logging.getLogger(__name__)

PART = 1024 * 1024
"""Bytes of a part."""
CREDITS = 16
"""Parts that may be on their way to one consumer."""
_RETRY_S = 5.0
"""Silence after which a client makes a new connection."""
_U32 = struct.Struct("<I")
_MAX_CONTROL = 256
_LARGEST_KEPT = 24 << 20
"""glibc unmaps freed blocks as large as the largest that it has seen freed, up to 32 MiB; then every part is paid for
with page faults again (a third of a pull's time)."""


class BulkError(Exception):
    """A parcel cannot be pulled."""


class ParcelGone(BulkError):
    """The server does not hold the parcel: it was acknowledged, or belongs to another incarnation."""


class BulkRefused(BulkError):
    """The server does not accept this client's key."""


class BulkTimeout(BulkError):
    """The parcel did not come in time; the text says how much had come."""


def proof(key: bytes, nonce: bytes) -> bytes:
    """What a client answers to a nonce."""
    return hmac.new(key, b"miles-hpc bulk" + nonce, hashlib.sha256).digest()


@dataclass
class _Peer:
    nonce: bytes
    admitted: bool = False
    parcel: bytes = b""
    number: int = 0
    credits: int = 0


class BulkServer:
    """Serves parcels from a thread of its own.

    Args:
        listen: port 0 picks a free one; `address` tells it.
        key: clients must know it.
        find: the memory of a parcel, of which at least the first bytes, as many as asked for, are final; None: it is
            not held. Called in the server's thread.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, listen: HostAndPort, key: bytes, find: Callable[[bytes, int], memoryview | None]) -> None:
        self._key = key
        self._find = find
        self._peers: dict[bytes, _Peer] = {}
        context: Context = zmq.Context.instance()
        self._socket: Socket = context.socket(zmq.ROUTER)
        try:
            prepare(self._socket, listen)
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.set(zmq.MAXMSGSIZE, _MAX_CONTROL)
            # Bounded by credits: a peer never has more than CREDITS parts queued.
            self._socket.sndhwm = 0
            self.address = bind(self._socket, listen)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="bulk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and release the address. A repeat changes nothing."""
        if self._thread.is_alive():
            os.write(self._wake, b".")
            self._thread.join()
            os.close(self._wake)
            os.close(self._woken)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        try:
            while self._woken not in dict(poller.poll()):
                with contextlib.suppress(zmq.Again):
                    route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                    try:
                        self._on_frames(route, frames)
                    except (IndexError, struct.error) as error:
                        log.warning("a message to %s was dropped: %r", self.address.netloc, error)
        finally:
            self._socket.close(linger=0)

    def _on_frames(self, route: bytes, frames: list[bytes]) -> None:
        word = frames[0]
        if word == b"hello":
            if len(self._peers) > 10_000:
                self._peers.clear()  # every living client notices the silence and says hello again
            self._peers[route] = peer = _Peer(os.urandom(32))
            self._send(route, b"nonce", peer.nonce)
            return
        found = self._peers.get(route)
        if found is None:
            return
        if word == b"proof":
            found.admitted = hmac.compare_digest(frames[1], proof(self._key, found.nonce))
            self._send(route, b"welcome" if found.admitted else b"refused")
        elif not found.admitted:
            self._send(route, b"refused")
        elif word == b"pull":
            found.parcel = frames[1]
            found.number, found.credits = _U32.unpack(frames[2])[0], min(CREDITS, _U32.unpack(frames[3])[0])
            self._push(route, found)
        elif word == b"credit" and frames[1] == found.parcel:
            found.credits = min(CREDITS, found.credits + _U32.unpack(frames[2])[0])
            self._push(route, found)

    def _push(self, route: bytes, peer: _Peer) -> None:
        while peer.credits:
            start = peer.number * PART
            memory = self._find(peer.parcel, start + PART)
            if memory is None:
                self._send(route, b"gone", peer.parcel)
                return
            body = memory[start : start + PART]
            if not len(body) or not self._send(route, b"part", peer.parcel, _U32.pack(peer.number), body):
                return
            peer.number += 1
            peer.credits -= 1

    def _send(self, route: bytes, *frames: bytes | memoryview) -> bool:
        try:
            self._socket.send(route, zmq.SNDMORE | zmq.NOBLOCK)
            for index, frame in enumerate(frames):
                more = zmq.SNDMORE if index < len(frames) - 1 else 0
                self._socket.send(frame, more | zmq.NOBLOCK, copy=len(frame) <= _MAX_CONTROL)
        except zmq.ZMQError as failure:
            if failure.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._peers.pop(route, None)  # it comes back on a new connection and pulls on from where it was
            return False
        return True


class BulkClient:
    """Pulls parcels from one server, in the caller's thread, one at a time.

    Args:
        address: of the server.
        key: that the server checks.
    """

    def __init__(self, address: HostAndPort, key: bytes) -> None:
        self.address = address
        self.key = key
        self.connections = 0
        """Made so far; more than one means that a connection broke or was silent."""
        self._socket: Socket | None = None
        np.empty(_LARGEST_KEPT, np.uint8)  # never touched: freeing it is the point

    def pull(self, parcel: bytes, into: memoryview, timeout_s: float) -> None:
        """Fill `into`, which has the parcel's size.

        Raises:
            ParcelGone, BulkRefused, BulkTimeout
        """
        deadline = time.monotonic() + timeout_s
        parts = -(-len(into) // PART)
        done = 0
        while done < parts:
            socket = self._connect(deadline)
            if socket is not None:
                done = self._pull_from(socket, parcel, into, done, parts, deadline)
            if done < parts:
                self._disconnect()
                if time.monotonic() >= deadline:
                    raise BulkTimeout(
                        f"{done} of {parts} parts came from {self.address.netloc} within {timeout_s:g} s; is the "
                        f"executor alive, and can this node reach that port?"
                    )

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _connect(self, deadline: float) -> Socket | None:
        """An admitted connection, or None when none came about in a while."""
        if self._socket is not None:
            return self._socket
        context: Context = zmq.Context.instance()
        socket: Socket = context.socket(zmq.DEALER)
        prepare(socket, self.address)
        socket.set(zmq.MAXMSGSIZE, PART)
        socket.rcvhwm = 0
        socket.connect(self.address.zmq)
        self._socket = socket
        self.connections += 1
        until = min(deadline, time.monotonic() + _RETRY_S)
        socket.send(b"hello")
        while (frames := _receive(socket, until)) is not None:
            word = frames[0].bytes
            if word == b"nonce":
                socket.send_multipart([b"proof", proof(self.key, frames[1].bytes)])
            elif word == b"welcome":
                return socket
            elif word == b"refused":
                self._disconnect()
                raise BulkRefused(f"{self.address.netloc} does not accept this key: another attempt's executor?")
        return None

    def _pull_from(
        self, socket: Socket, parcel: bytes, into: memoryview, done: int, parts: int, deadline: float
    ) -> int:
        socket.send_multipart([b"pull", parcel, _U32.pack(done), _U32.pack(CREDITS)])
        unsaid = 0
        while done < parts:
            frames = _receive(socket, min(deadline, time.monotonic() + _RETRY_S))
            if frames is None:
                break
            word = frames[0].bytes
            if word == b"refused":
                break  # the server forgot this connection
            if len(frames) < 2 or frames[1].bytes != parcel:
                continue  # the end of an earlier pull
            if word == b"gone":
                raise ParcelGone(f"{self.address.netloc} does not hold the parcel any longer")
            if word != b"part" or _U32.unpack(frames[2].bytes)[0] != done:
                continue
            start = done * PART
            body = frames[3].buffer
            if len(body) != min(PART, len(into) - start):
                raise BulkError(f"part {done} has {len(body)} bytes; the parcel is not the one that was described")
            into[start : start + len(body)] = body
            done += 1
            unsaid += 1
            if unsaid >= CREDITS // 4 and done < parts:
                socket.send_multipart([b"credit", parcel, _U32.pack(unsaid)])
                unsaid = 0
        return done


def _receive(socket: Socket, until: float) -> list[zmq.Frame] | None:
    with contextlib.suppress(zmq.Again):
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    if not socket.poll(milliseconds(until - time.monotonic())):
        return None
    return socket.recv_multipart(copy=False)
