"""Keeps the logs of workers bounded: of a file that grows beyond its limit the head and the tail stay.

Workers write by themselves, to a descriptor that appends, so that nothing stands between a crash and its last words. A
thread looks at the sizes: a file system that stalls must not stall the agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import msgspec

LIMIT = 256 << 20
HEAD = TAIL = 64 << 20
EVERY_S = 0.5
_CHUNK = 1 << 20
_CATCH_UPS = 4


class _Log(msgspec.Struct):
    path: Path
    left_out: int = 0
    last: bool = False
    """Its worker has ended: it is looked at once more."""


def cut(path: Path, left_out: int = 0, *, limit: int = LIMIT, head: int = HEAD, tail: int = TAIL) -> int:
    """Take the middle out of a file that is larger than `limit`, while its writer goes on appending.

    What the writer appends in the microseconds between the last copy and the cut is lost.

    Args:
        left_out: bytes that earlier cuts have taken out of this file.

    Returns:
        Bytes taken out so far, which the file says where they were.

    Raises:
        OSError: when the file cannot be read or written.
    """
    size = path.stat().st_size
    if size <= limit:
        return left_out
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        # Counted as if the mark of an earlier cut were a part of the log; it is a line.
        left_out += size - head - tail
        mark = f"\n[miles-hpc: {left_out} bytes are left out here; a log keeps {limit} bytes]\n".encode()
        to = head + os.pwrite(fd, mark, head)
        start = size - tail
        for _ in range(_CATCH_UPS):
            to = _move(fd, start, size, to)
            start, size = size, os.fstat(fd).st_size
            if size - start < _CHUNK:
                break
        to = _move(fd, start, size, to)
        os.ftruncate(fd, to)
    finally:
        os.close(fd)
    return left_out


def _move(fd: int, start: int, end: int, to: int) -> int:
    """Copy a part of a file to a place before it. Returns the end of the copy."""
    while start < end:
        data = os.pread(fd, min(_CHUNK, end - start), start)
        if not data:
            break
        start += len(data)
        to += os.pwrite(fd, data, to)
    return to


class LogKeeper:
    """Cuts the logs that it was told of."""

    def __init__(self, limit: int = LIMIT, every_s: float = EVERY_S) -> None:
        self._limit = limit
        self._every_s = every_s
        self._lock = threading.Lock()
        self._cutting = threading.Lock()
        self._logs: dict[Path, _Log] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, path: Path) -> None:
        """From now on this file is kept bounded."""
        with self._lock:
            self._logs.setdefault(path, _Log(path)).last = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
            self._thread.start()

    def left_out(self, path: Path) -> int:
        """Bytes that were taken out of a file so far."""
        with self._lock:
            log = self._logs.get(path)
        return 0 if log is None else log.left_out

    def finish(self, path: Path) -> int:
        """Its writer has ended: look at it here and now, for the last time. Returns the bytes taken out in all.

        Raises:
            OSError.
        """
        with self._cutting:
            with self._lock:
                log = self._logs.pop(path, None)
            return self._cut(log or _Log(path))

    def _cut(self, log: _Log) -> int:
        log.left_out = cut(log.path, log.left_out, limit=self._limit, **self._parts())
        return log.left_out

    def release(self, path: Path) -> None:
        """Its writer has ended: look at it once more, then no longer."""
        with self._lock:
            log = self._logs.get(path)
            if log is not None:
                log.last = True
        self._wake.set()

    def close(self, patience_s: float = 2.0) -> None:
        """Look at everything once more, for at most `patience_s`."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._every_s)
            self._wake.clear()
            closed = self._closed
            with self._lock:
                logs = list(self._logs.values())
            for log in logs:
                last = log.last
                # A file that is gone, or a file system that is full: there is nothing to cut, or nothing to be done.
                with contextlib.suppress(OSError), self._cutting:
                    if log.path in self._logs:
                        self._cut(log)
                if last:
                    with self._lock:
                        if log.last:
                            self._logs.pop(log.path, None)
            if closed:
                return

    def _parts(self) -> dict[str, int]:
        return {"head": min(HEAD, self._limit // 4), "tail": min(TAIL, self._limit // 4)}
