"""Options that all sockets of ours share, and the reading of their monitors."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import TypeAlias

import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.security import KeyPair

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

LINK_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
"""What a client's monitor reports."""


CURVE_ADDS = 33
"""Bytes by which a frame grows when it is encrypted; ZMQ_MAXMSGSIZE counts them."""


def milliseconds(seconds: float) -> int:
    """A timeout for a poller, never below 0 and rounded up, so that a short wait does not become a busy loop."""
    return max(0, math.ceil(seconds * 1000))


_ZERO_COPY_RECV = 10
"""ZMQ_ZERO_COPY_RECV of zmq.h, an option of contexts that pyzmq does not name."""


def copy_what_comes(context: Context) -> None:
    """Let messages be copied out of a connection's read buffer; else they are parts of it, counted at its far end.

    That is one page less of memory for each connection, and no loss: what is decrypted is copied anyway. For sockets
    that are made later.
    """
    with contextlib.suppress(zmq.ZMQError):  # another libzmq, which may not have it
        context.set(_ZERO_COPY_RECV, 0)


def prepare(socket: Socket, address: HostAndPort) -> None:
    """Options that every socket of ours has: IPv6 where needed, no linger, and a dead node noticed in ~11 s."""
    socket.linger = 0
    socket.ipv6 = ":" in address.host
    socket.set(zmq.HANDSHAKE_IVL, 10_000)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 5)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)


def give_up_lost_peers(socket: Socket) -> None:
    """End connections whose bytes are not acknowledged for 10 s, and attempts to connect that take 3 s.

    For control links only. Keepalive says nothing while bytes are under way, and TCP's own attempts come ever more
    seldom: after a cut of a minute a link would be silent for another one. (On a bulk link the same limit would end
    the connection to a reader that is busy for a while.)
    """
    socket.set(zmq.TCP_MAXRT, 10_000)
    socket.set(zmq.CONNECT_TIMEOUT, 3_000)


def prepare_server(socket: Socket, keys: KeyPair, domain: str) -> None:
    """Make a socket a CURVE server that admits only what the ZAP handler knows for `domain`.

    With ZAP_ENFORCE_DOMAIN a missing handler admits nobody instead of everybody.
    """
    socket.curve_server = True
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.set(zmq.ZAP_DOMAIN, domain.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def prepare_client(socket: Socket, keys: KeyPair, server_public: str) -> None:
    """Make a socket a CURVE client of the server with this public key.

    IMMEDIATE refuses to queue for a peer that is not connected, so that nothing stale is sent after a reconnect.
    """
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = server_public.encode()
    socket.set(zmq.IMMEDIATE, 1)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)


_EVENT = struct.Struct("=hi")
"""First frame of a monitor's message: event and value (zmq_socket_monitor(3)). pyzmq's own reader imports asyncio."""


def drain_monitor(monitor: Socket) -> list[int]:
    """The events (zmq.EVENT_…) that a monitor socket holds."""
    found: list[int] = []
    while True:
        try:
            found.append(_EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])[0])
        except zmq.Again:
            return found


def bind(socket: Socket, address: HostAndPort) -> HostAndPort:
    """Bind and return the address with its real port.

    Raises:
        OSError: with the errno of bind(2); the text names the address.
    """
    host = f"[{address.host}]" if ":" in address.host else address.host
    try:
        socket.bind(f"tcp://{host}:{address.port or '*'}")
    except zmq.ZMQError as failure:
        raise OSError(failure.errno, f"cannot listen on {address.netloc}: {failure.strerror}") from failure
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return HostAndPort(address.host, int(endpoint.rstrip(b"\0").rpartition(b":")[2]))
