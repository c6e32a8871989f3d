"""A counter that shows that a program's own loop moves: a program bumps it, its agent reads it, no message is sent.

A process can be alive, and answer on its port, while the loop that does the work stands still.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "MILES_HPC_PROGRESS"
"""Environment variable with the path of the counter's file."""
SIZE = 8
_COUNT = struct.Struct("=Q")


class ProgressCounter:
    """The program's end. Without a file, when the program was started by hand, it counts for nobody."""

    def __init__(self, path: str = "") -> None:
        self._count = 0
        self._memory = mmap.mmap(-1, SIZE)
        if path:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._memory = mmap.mmap(fd, SIZE)
            finally:
                os.close(fd)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> ProgressCounter:
        """The counter that an agent made for this program.

        Raises:
            OSError: when its file cannot be opened.
        """
        return cls(environ.get(VARIABLE, ""))

    def bump(self) -> None:
        """One more turn of the loop."""
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)


class ProgressReader:
    """The agent's end; makes the file, and reads it without a system call.

    Raises:
        OSError: when the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, SIZE)
            self._memory = mmap.mmap(fd, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)

    def read(self) -> int:
        """The count; 0 before the first bump."""
        return int(_COUNT.unpack_from(self._memory)[0])

    def close(self) -> None:
        self._memory.close()
