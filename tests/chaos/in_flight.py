"""Stops a process in the middle of a request, or of a file, so that a test knows what a signal hits."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from .conftest import SmokeRun, wait_for

_HTTP_POOLS = ("engine-policy-0", "router-policy", "session-server")
_SMALLEST_REQUEST = 250
"""Bytes; a health check and its answer are smaller, a generation and its answer are larger."""
_FROZEN_S, _FREE_S = 0.25, 0.5
"""How long a worker is looked at, and then left alone: it must get on with its work, or its start, in between."""


def freeze_busy(run: SmokeRun, worker: str, other_than: int = 0) -> int:
    """SIGSTOP a worker at a moment when a generation is under way in it; returns its pid.

    While it is stopped nothing of it can end: bytes of a request or an answer that wait unread in one of its sockets
    prove it. A worker that was met idle is let go, and met again.
    """

    def caught() -> int | None:
        pid = _pid_if_ready(run, worker)
        if pid in (0, other_than):
            return None
        addresses = _http_addresses(run)
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _FROZEN_S
        while time.monotonic() < deadline:
            if any(unread >= _SMALLEST_REQUEST for unread in _unread(pid, addresses)):
                return pid
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_FREE_S)
        return None

    return wait_for(caught, f"{worker} to be busy")


def _pid_if_ready(run: SmokeRun, worker: str) -> int:
    assert run.process.poll() is None, f"the run has ended: {run.tail()}"
    row = run.cell(worker.rpartition("-")[0])
    return row.workers[0].pid if row is not None and row.state == "ready" and row.workers else 0


def _http_addresses(run: SmokeRun) -> set[str]:
    """Of engines, router and session servers, as /proc/net/tcp writes them."""
    status = run.status()
    if status is None:
        return set()
    hosts = {node.node: node.address for node in status.nodes}
    return {
        _kernel_text(hosts[cell.node], worker.ports["http"])
        for cell in status.cells
        for worker in cell.workers
        if cell.pool in _HTTP_POOLS and "http" in worker.ports
    }


def _kernel_text(host: str, port: int) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{port:04X}"


def _unread(pid: int, addresses: set[str]) -> Iterator[int]:
    """Bytes that wait in each established connection of a process from or to one of these addresses."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:
            continue
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_, inode = line.split()[:10]
        if state == "01" and f"socket:[{inode}]" in own and {local, remote} & addresses:
            yield int(queues.partition(":")[2], 16)


class Creations:
    """Names of files that appear in a directory, told by the kernel (inotify) within microseconds."""

    _CREATE = 0x100

    def __init__(self, directory: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(directory), self._CREATE) < 0:
            raise OSError(ctypes.get_errno(), f"inotify of {directory}")

    def wait(self, timeout_s: float) -> list[str]:
        """What has appeared; waits for the first for a while."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        data, names, at = os.read(self._fd, 65536), [], 0
        while at < len(data):
            (length,) = struct.unpack_from("I", data, at + 12)
            names.append(data[at + 16 : at + 16 + length].rstrip(b"\0").decode())
            at += 16 + length
        return names

    def close(self) -> None:
        os.close(self._fd)
