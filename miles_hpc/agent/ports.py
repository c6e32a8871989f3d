"""Ports of one node's workers: chosen, held against other runs of the same user, checked just before use.

A port that is free now can be taken before its program binds it. Three things keep that rare and harmless: each (run,
attempt, node) starts its search at another offset, a byte lock per port keeps agents of one user on one machine apart
for as long as the worker lives, and `busy` is asked right before the program starts, so that a loser is started again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from miles_hpc.agent import procfs
from miles_hpc.wire.hashes import blake2b
from miles_hpc.wire.ids import parse_worker_id
from miles_hpc.wire.messages import PortInfo

DEFAULT_FIRST = 20000
_SMALLEST_RANGE = 1000


class PortError(Exception):
    """No port can be given; the text names the port and who holds it, or the range that is used up."""


def default_range() -> tuple[int, int]:
    """First and last dynamic port: from 20000 to below what the kernel hands out to outgoing connections."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    for first, last in ((DEFAULT_FIRST, low - 1), (high + 1, 65535), (5000, low - 1)):
        if last - first >= _SMALLEST_RANGE:
            return first, last
    return DEFAULT_FIRST, 65535


def start_offset(run_id: str, attempt: int, node: str, span: int) -> int:
    """Where in a range of `span` ports a node of a run begins to search."""
    digest = blake2b(f"{run_id}/{attempt}/{node}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % span


def can_bind(address: str, port: int, *, fresh: bool = False) -> bool:
    """Whether a server could listen on this port now.

    Args:
        fresh: also refuse a port with old connections in TIME_WAIT, which a server with SO_REUSEADDR could take.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if not fresh:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise PortError(f"cannot bind {address}: {error.strerror}: is it an address of this machine?") from error
        return True


def holders(port: int) -> list[tuple[int, str]]:
    """(pid, command) of the processes that listen on a port, as far as this user may see them."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return []
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [(pid, procfs.command_line(pid)) for pid in pids if _has_socket(pid, inodes)]


def is_served_by(port: int, pids: Iterable[int]) -> bool:
    """Whether one of these processes listens on a port, on whatever address; also True when that cannot be seen."""
    inodes = set(_listening_inodes(port))
    return not inodes or any(_has_socket(pid, inodes) for pid in pids)


def _has_socket(pid: int, inodes: set[str]) -> bool:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            link = str(descriptor.readlink())
            if link.startswith("socket:[") and link[8:-1] in inodes:
                return True
    return False


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # LISTEN
                yield fields[9]


def describe_holder(port: int) -> str:
    """Who holds a busy port, for an error text."""
    found = holders(port)
    if not found:
        return "the holder belongs to another user, or the port is in use by an outgoing connection"
    return ", ".join(f"pid {pid}: {command[:120]}" for pid, command in found)


class PortLocks:
    """One byte lock per port in a file that all agents of a user on this machine share; a dead agent's locks vanish."""

    def __init__(self, directory: str | None = None) -> None:
        path = Path(directory or tempfile.gettempdir()) / f"miles-hpc-{os.getuid()}.ports"
        self._fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return  # without the file the bind checks alone decide
        if os.fstat(fd).st_uid == os.getuid():
            self._fd = fd
        else:
            os.close(fd)

    def take(self, port: int) -> bool:
        """Lock a port. False: another agent has it."""
        if self._fd < 0:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True

    def release(self, port: int) -> None:
        if self._fd >= 0:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, port)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Ports:
    """The ports that the workers of one node hold, by worker."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        attempt: int,
        node: str,
        port_range: tuple[int, int] | None = None,
        locks: PortLocks | None = None,
    ) -> None:
        self.address = address
        self.first, self.last = port_range or default_range()
        if self.first > self.last:
            raise PortError(
                f"network.port_range = [{self.first}, {self.last}] is empty: the first must not exceed the last"
            )
        self._span = self.last - self.first + 1
        self._cursor = start_offset(run_id, attempt, node, self._span)
        self._held: dict[str, dict[str, tuple[int, int]]] = {}
        """worker -> port name -> (first port, count)"""
        self._locks = locks or PortLocks()

    def reserve(self, worker: str, infos: Iterable[PortInfo], cell_index: int, keep: dict[str, int]) -> dict[str, int]:
        """Choose the ports of a worker: the kept ones where free, fixed ones as declared, others from the range.

        A block of `num_consecutive` ports is named by its first. A `master` port belongs to worker 0 of its cell alone.

        Raises:
            PortError: nothing was reserved then.
        """
        self.release(worker)
        chosen: dict[str, tuple[int, int]] = {}
        self._held[worker] = chosen
        is_master = parse_worker_id(worker)[2] == 0
        try:
            for info in infos:
                if info.mode == "master" and not is_master:
                    continue
                chosen[info.name] = (
                    self._choose(info, cell_index, keep.get(info.name, 0)),
                    info.num_consecutive,
                )
        except PortError:
            self.release(worker)
            raise
        return {name: first for name, (first, _) in chosen.items()}

    def _choose(self, info: PortInfo, cell_index: int, kept: int) -> int:
        count = info.num_consecutive
        fixed = info.static_port + (cell_index if info.offset_by_cell else 0) if info.static_port else 0
        for candidate in (fixed, kept if info.allow_dynamic else 0):
            if candidate and not self._taken(candidate, count) and self._lock(candidate, count):
                return candidate
        if not info.allow_dynamic:
            block = range(fixed, fixed + count)
            port = next((p for p in block if self._taken(p, 1)), fixed)
            raise PortError(
                f"port {port} ({info.name!r}) on {self.address} is busy ({self._why_taken(port)}): "
                "stop its holder or choose another port"
            )
        for _ in range(self._span):
            candidate = self.first + self._cursor
            if candidate + count - 1 > self.last:
                self._cursor = 0
                continue
            self._cursor = (self._cursor + count) % self._span
            if not self._taken(candidate, count, fresh=True) and self._lock(candidate, count):
                return candidate
        raise PortError(
            f"no {count} consecutive free ports in {self.first}..{self.last} on {self.address}: "
            "widen network.port_range"
        )

    def _taken(self, first: int, count: int, *, fresh: bool = False) -> bool:
        mine = self._mine()
        for port in range(first, first + count):
            if port > 65535 or port in mine or not can_bind(self.address, port, fresh=fresh):
                return True
            # A program that ignores its address and listens everywhere also needs the other addresses' port.
            if fresh and not can_bind("::" if ":" in self.address else "0.0.0.0", port, fresh=True):
                return True
        return False

    def _why_taken(self, port: int) -> str:
        owner = next((worker for worker, held in self._held.items() if port in _ports_of(held.values())), None)
        if owner is not None:
            return f"reserved for {owner}"
        if can_bind(self.address, port):
            return "locked by the agent of another run"
        return describe_holder(port)

    def _mine(self) -> set[int]:
        return {port for held in self._held.values() for port in _ports_of(held.values())}

    def _lock(self, first: int, count: int) -> bool:
        for port in range(first, first + count):
            if not self._locks.take(port):
                for taken in range(first, port):
                    self._locks.release(taken)
                return False
        return True

    def busy(self, worker: str) -> str:
        """Which of a worker's ports cannot be bound, and who holds it; "" when all are free."""
        for name, (first, count) in self._held.get(worker, {}).items():
            for port in range(first, first + count):
                if not can_bind(self.address, port):
                    return f"port {port} ({name!r}) on {self.address} is busy ({describe_holder(port)})"
        return ""

    def release(self, worker: str) -> None:
        """Give a worker's ports back."""
        for port in _ports_of(self._held.pop(worker, {}).values()):
            self._locks.release(port)

    def close(self) -> None:
        """Give all ports back."""
        self._held.clear()
        self._locks.close()


def _ports_of(blocks: Iterable[tuple[int, int]]) -> Iterator[int]:
    for first, count in blocks:
        yield from range(first, first + count)
