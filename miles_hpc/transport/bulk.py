"""Parcels between nodes: the consumer pulls parts of 1 MiB on credits, and goes on from the last one after a break.

The connection is plain TCP, without ZeroMQ: a part goes from the parcel into the socket and from there into its place
at the consumer. Messages of ZeroMQ are one more copy, one more thread and fresh memory on each side: 1.8 times the CPU.
Bytes are neither encrypted nor signed. Who may pull is decided when a connection is made: the server sends a nonce, the
client answers with its HMAC under a key that it was told over the encrypted RPC. Whoever can read or change the network
between the nodes can read or change the parcels; on a network that is not trusted, keep ranks on the executor's node or
use an encrypted overlay.

Each message is a head (word, number, length of the body) and a body. Client to server: `PROOF` hmac; `PULL` first part,
credits and parcel; `CREDIT` so many more. Server to client: `NONCE` nonce; `WELCOME`; `REFUSED`; `PART` number, bytes;
`END`, which says that the parcel was held until its last part was sent; `GONE`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import selectors
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from miles_hpc.wire.address import HostAndPort

log = logging.getLogger(__name__)

PART = 1024 * 1024
"""Bytes of a part."""
CREDITS = 16
"""Parts that may be on their way to one consumer."""
HEAD = struct.Struct("<BII")
PROOF, PULL, CREDIT, NONCE, WELCOME, REFUSED, PART_OF, END, GONE = range(1, 10)
_CREDITS_AND_PARCEL = struct.Struct("<I16s")
_MAX_CONTROL = 256
_RETRY_S = 5.0
"""Silence after which a client makes a new connection."""
_AGAIN_S = (0.05, 1.0)
"""Shortest and longest time between attempts to connect."""
_PROVE_S = 10.0
"""A connection that has not proved the key by then is closed."""
_UNPROVED = 256
"""Connections that may be about to prove the key; beyond them the oldest is closed."""
_USER_TIMEOUT_S = 60.0
"""Time after which a connection ends whose other end acknowledges nothing, or takes nothing."""


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


@dataclass(eq=False)
class _Peer:
    socket: sockets.socket
    prove_by: float
    nonce: bytes = field(default_factory=lambda: os.urandom(32))
    admitted: bool = False
    ending: bool = False
    """It is closed once it has been sent what is under way."""
    parcel: bytes = b""
    number: int = 0
    credits: int = 0
    came: bytearray = field(default_factory=bytearray)
    under_way: list[memoryview] = field(default_factory=list)


class BulkServer:
    """Serves parcels from a thread of its own.

    Args:
        listen: port 0 picks a free one; `address` tells it.
        key: clients must know it.
        find: the memory of a parcel, of which at least the first bytes, as many as asked for, are final; None: it is
            not held, and never will be again. Called in the server's thread.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, listen: HostAndPort, key: bytes, find: Callable[[bytes, int], memoryview | None]) -> None:
        self._key = key
        self._find = find
        self._peers: set[_Peer] = set()
        self._accepts_from: float | None = None
        self._listener = _listen(listen)
        self.address = HostAndPort(listen.host, self._listener.getsockname()[1])
        self._woken, self._wake = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
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
        try:
            while True:
                ready = self._selector.select(self._next_deadline())
                if any(key.fileobj == self._woken for key, _ in ready):
                    return
                for key, events in ready:
                    if key.data is None:
                        self._accept()
                    elif key.data in self._peers:
                        self._turn(key.data, events)
                self._on_time()
        finally:
            for peer in [*self._peers]:
                self._drop(peer)
            self._listener.close()
            self._selector.close()

    def _next_deadline(self) -> float | None:
        times = [peer.prove_by for peer in self._peers if not peer.admitted]
        if self._accepts_from is not None:
            times.append(self._accepts_from)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_time(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.admitted and now >= peer.prove_by]:
            self._drop(peer)
        if self._accepts_from is not None and now >= self._accepts_from:
            self._accepts_from = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptors are left: the listener stays readable, and must not be asked at once
            log.warning("%s accepts nobody for a second: %s", self.address.netloc, error)
            self._selector.unregister(self._listener)
            self._accepts_from = time.monotonic() + 1.0
            return
        try:
            socket.setblocking(False)
            _prepare(socket)
            peer = _Peer(socket, time.monotonic() + _PROVE_S)
            self._selector.register(socket, selectors.EVENT_READ, peer)
        except Exception as error:  # a connection that is reset already, or no memory: as in `_turn`
            log.warning("%s cannot serve a connection: %r", self.address.netloc, error)
            socket.close()
            return
        self._peers.add(peer)
        unproved = [peer for peer in self._peers if not peer.admitted]
        if len(unproved) > _UNPROVED:
            self._drop(min(unproved, key=lambda peer: peer.prove_by))
        self._say(peer, NONCE, peer.nonce)
        self._turn(peer, 0)

    def _turn(self, peer: _Peer, events: int) -> None:
        """Read what has come, and send at most one part, so that each peer has its turn."""
        try:
            if events & selectors.EVENT_READ:
                self._read(peer)
            if not peer.under_way:
                self._next_part(peer)
            self._flush(peer)
        except Exception as error:  # whatever it is, it ends one connection and not the thread that serves all of them
            if not isinstance(error, OSError):
                log.warning("a connection to %s is closed: %r", self.address.netloc, error)
            self._drop(peer)
            return
        if peer.ending and not peer.under_way:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ
        if peer.under_way or (peer.parcel and peer.credits):
            wanted |= selectors.EVENT_WRITE
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    def _read(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            data = peer.socket.recv(4096)
            if not data:
                raise ConnectionResetError
            peer.came += data
        while len(peer.came) >= HEAD.size and not peer.ending:
            word, number, length = HEAD.unpack_from(peer.came)
            if length > _MAX_CONTROL:
                raise struct.error(f"a body of {length} bytes")
            end = HEAD.size + length
            if len(peer.came) < end:
                return
            body = bytes(peer.came[HEAD.size : end])
            del peer.came[:end]
            self._on_message(peer, word, number, body)

    def _on_message(self, peer: _Peer, word: int, number: int, body: bytes) -> None:
        if not peer.admitted:
            peer.admitted = word == PROOF and hmac.compare_digest(body, proof(self._key, peer.nonce))
            peer.ending = not peer.admitted
            self._say(peer, WELCOME if peer.admitted else REFUSED)
        elif word == PULL:
            credits, peer.parcel = _CREDITS_AND_PARCEL.unpack(body)
            peer.number, peer.credits = number, min(CREDITS, credits)
        elif word == CREDIT:
            peer.credits = min(CREDITS, peer.credits + number)

    def _next_part(self, peer: _Peer) -> None:
        if not peer.parcel or not peer.credits:
            return
        start = peer.number * PART
        memory = self._find(peer.parcel, start + PART)
        if memory is None:
            peer.parcel = b""
            self._say(peer, GONE)
        elif body := memory[start : start + PART]:
            self._say(peer, PART_OF, body, peer.number)
            peer.number += 1
            peer.credits -= 1
            if start + len(body) == len(memory):
                peer.credits = max(1, peer.credits)  # the end costs nothing
        else:
            # What was sent was the parcel's, and not of one that was given its memory: it is held to this moment.
            peer.parcel = b""
            self._say(peer, END)

    def _say(self, peer: _Peer, word: int, body: bytes | memoryview = b"", number: int = 0) -> None:
        peer.under_way.append(memoryview(HEAD.pack(word, number, len(body))))
        if body:
            peer.under_way.append(memoryview(body))

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.under_way:
                sent = peer.socket.sendmsg(peer.under_way)
                while peer.under_way and sent >= len(peer.under_way[0]):
                    sent -= len(peer.under_way.pop(0))
                if sent:
                    peer.under_way[0] = peer.under_way[0][sent:]

    def _drop(self, peer: _Peer) -> None:
        # It comes back on a new connection and pulls on from where it was.
        self._peers.discard(peer)
        peer.under_way.clear()
        self._selector.unregister(peer.socket)
        peer.socket.close()


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
        self._socket: sockets.socket | None = None
        self._head = bytearray(HEAD.size)

    def pull(self, parcel: bytes, into: memoryview, timeout_s: float) -> None:
        """Fill `into`, which has the parcel's size.

        Raises:
            ParcelGone, BulkRefused, BulkTimeout
        """
        deadline = time.monotonic() + timeout_s
        parts = -(-len(into) // PART)
        done = 0
        pause, longest = _AGAIN_S
        while True:
            before = done
            try:
                if self._socket is None:
                    self._connect(deadline)
                for count in self._parts(parcel, into, done, deadline):
                    done = count
                return
            except OSError as error:
                self.close()
                if time.monotonic() >= deadline:
                    raise BulkTimeout(
                        f"{done} of {parts} parts came from {self.address.netloc} within {timeout_s:g} s ({error}); is "
                        f"the executor alive, and can this node reach that port?"
                    ) from error
            except ParcelGone:
                raise
            except BaseException:
                self.close()  # the rest of this parcel is still to come on it
                raise
            pause = _AGAIN_S[0] if done > before else min(longest, 2 * pause)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self, deadline: float) -> None:
        wait = min(_RETRY_S, max(0.001, deadline - time.monotonic()))
        self._socket = socket = sockets.create_connection((self.address.host, self.address.port), wait)
        _prepare(socket)
        self.connections += 1
        nonce = bytearray(32)
        if self._receive_head(deadline) != (NONCE, 0, len(nonce)):
            raise ConnectionError("who answers there is no executor or worker")
        self._receive(memoryview(nonce), deadline)
        self._send(PROOF, 0, proof(self.key, bytes(nonce)))
        word, _, _ = self._receive_head(deadline)
        if word == REFUSED:
            raise BulkRefused(f"{self.address.netloc} does not accept this key: another attempt's executor?")
        if word != WELCOME:
            raise ConnectionError(f"found message {word}, expected a welcome")

    def _parts(self, parcel: bytes, into: memoryview, done: int, deadline: float) -> Iterator[int]:
        """Receives parts from `done` on into their places; yields how many have come."""
        self._send(PULL, done, _CREDITS_AND_PARCEL.pack(CREDITS, parcel))
        parts = -(-len(into) // PART)
        unsaid = 0
        while True:
            word, number, length = self._receive_head(deadline)
            if word == GONE:
                raise ParcelGone(f"{self.address.netloc} does not hold the parcel any longer")
            if word == END and done == parts:
                return
            start = done * PART
            if word != PART_OF or number != done or length != min(PART, len(into) - start):
                raise BulkError(
                    f"after {done} of {parts} parts {self.address.netloc} sent message {word} with {length} bytes; the "
                    f"parcel is not the one that was described"
                )
            self._receive(into[start : start + length], deadline)
            done += 1
            unsaid += 1
            yield done
            if unsaid >= CREDITS // 4 and done < parts:
                self._send(CREDIT, unsaid)
                unsaid = 0

    def _send(self, word: int, number: int = 0, body: bytes = b"") -> None:
        assert self._socket is not None
        self._socket.sendall(HEAD.pack(word, number, len(body)) + body)

    def _receive_head(self, deadline: float) -> tuple[int, int, int]:
        self._receive(memoryview(self._head), deadline)
        word, number, length = HEAD.unpack(self._head)
        return word, number, length

    def _receive(self, into: memoryview, deadline: float) -> None:
        """Fill `into`.

        Raises:
            OSError: the connection broke, or was silent for a while.
        """
        assert self._socket is not None
        done = 0
        while done < len(into):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the time is over")
            self._socket.settimeout(min(_RETRY_S, left))
            count = self._socket.recv_into(into[done:])
            if not count:
                raise ConnectionError("the connection was closed")
            done += count


def _listen(address: HostAndPort) -> sockets.socket:
    try:
        family, _, _, _, place = sockets.getaddrinfo(
            address.host, address.port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
        )[0]
        both = family == sockets.AF_INET6 and sockets.has_dualstack_ipv6()
        listener = sockets.create_server(place, family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as failure:
        raise OSError(failure.errno, f"cannot listen on {address.netloc}: {failure.strerror}") from failure
    listener.setblocking(False)
    return listener


def _prepare(socket: sockets.socket) -> None:
    """A dead node is noticed within a minute.

    Probes of an idle connection do not run while sent bytes are unacknowledged. The user timeout ends both: without it
    those would be sent again for a quarter of an hour.
    """
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 5)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 2)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 3)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, int(1000 * _USER_TIMEOUT_S))
