"""How the other nodes of a job see at once that the first one is gone while it prepares the run.

It listens, and they connect: however it ends, its kernel tells them, whether a shared file system answers or not.
Nothing is sent, and no connection is ever accepted, since a process that forks must have no thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from miles_hpc.launch.node_address import other_addresses

SILENT_S = 15.0
"""A first node that was connected, and cannot be reached for this time, is gone."""
_CONNECT_S = 3.0
_AGAIN_S = 1.0
# A node without power says nothing: probes find it within SILENT_S.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))
_BACKLOG = Path("/proc/sys/net/core/somaxconn")


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first node listens while it prepares the run; port 0: nowhere."""

    host: str
    addresses: list[str]
    port: int


@contextlib.contextmanager
def listening(path: Path, nodes: int) -> Iterator[None]:
    """Let the other nodes see that this process lives, until the end of the block or its own.

    Where it cannot listen it says so, and they wait for their time limit.

    Raises:
        OSError: the word cannot be written.
    """
    server = _listen(nodes)
    try:
        word = Listening(host=socket.gethostname(), addresses=[], port=0)
        if server is not None:
            word = msgspec.structs.replace(word, addresses=other_addresses(""), port=server.getsockname()[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(word) + b"\n")
        draft.replace(path)
        yield
    finally:
        if server is not None:
            server.close()


def _listen(nodes: int) -> socket.socket | None:
    backlog = 2 * nodes  # with room for connections that are made again
    dual = socket.has_dualstack_ipv6()
    try:
        # Connections beyond what the kernel keeps would seem to be lost.
        if nodes < 2 or backlog > int(_BACKLOG.read_text()):
            return None
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=backlog
        )
    except OSError:
        return None
    # A child that outlives this process must not speak for it.
    os.register_at_fork(after_in_child=server.close)
    return server


class FirstNode:
    """The first node as another one sees it, from the time on at which it listens. Watched in a thread of its own."""

    def __init__(self, word: Listening) -> None:
        self.host = word.host
        self.gone = threading.Event()
        """It was connected, and nobody listens there any more: it has prepared the run, or has ended."""
        self._word = word
        # The thread inherits it: signals are for the main thread alone, which may hold them back for its successor.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            threading.Thread(target=self._run, name="first-node", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        connection = self._first_connection()
        address = connection.getpeername()[0]
        while True:
            _wait_for_its_end(connection)
            again = self._connect_again(address)
            if again is None:
                break
            connection = again
        self.gone.set()

    def _first_connection(self) -> socket.socket:
        """That it never comes says nothing: a network may let none through."""
        never = threading.Event()
        while True:
            for address in self._word.addresses:
                with contextlib.suppress(OSError):
                    return socket.create_connection((address, self._word.port), _CONNECT_S)
            never.wait(_AGAIN_S)

    def _connect_again(self, address: str) -> socket.socket | None:
        """None: nobody listens any more, or the node has been silent for too long."""
        deadline, never = time.monotonic() + SILENT_S, threading.Event()
        while True:
            try:
                return socket.create_connection((address, self._word.port), _CONNECT_S)
            except ConnectionRefusedError:
                return None
            except OSError:
                if time.monotonic() >= deadline:
                    return None
            never.wait(_AGAIN_S)


def _wait_for_its_end(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        while connection.recv(1):
            pass
