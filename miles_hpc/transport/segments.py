"""Shared memory of one node: reused segments of the producer, and the consumer's maps of them.

A segment is a memfd, which another process of the same user opens as /proc/<pid>/fd/<fd>. It has no name that could be
left behind, needs no room in /dev/shm, and is freed by the kernel when the last process that maps it is gone. A segment
that cannot be opened (another container, another user) is no error: the parcel then comes over TCP.
"""

from __future__ import annotations

import functools
import mmap
import os
from pathlib import Path

import msgspec

_NONCE = 16
DATA_AT = 64
"""Where the parcel begins in a segment; before it stands the nonce."""
_PAGE = 1 << 20


class SegmentRef(msgspec.Struct, frozen=True, kw_only=True):
    """How a process of the same node finds a segment, and knows that it is the right one."""

    boot_id: str
    pid: int
    fd: int
    inode: int
    size: int
    nonce: bytes


class SegmentUnreachable(Exception):
    """The segment is on another node, or cannot be opened from this process."""


@functools.cache
def boot_id() -> str:
    """Names this start of this machine; equal in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Segment:
    """A piece of shared memory of this process.

    Raises:
        OSError: there is no memory for it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._fd = os.memfd_create("miles-hpc", os.MFD_CLOEXEC)
        try:
            size = DATA_AT + capacity
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
            nonce = os.urandom(_NONCE)
            self._map[:_NONCE] = nonce
            self.ref = SegmentRef(
                boot_id=boot_id(),
                pid=os.getpid(),
                fd=self._fd,
                inode=os.fstat(self._fd).st_ino,
                size=size,
                nonce=nonce,
            )
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = memoryview(self._map)[DATA_AT:]
        """`capacity` bytes."""

    def close(self) -> None:
        """Give the memory back once nobody maps it; views of it stay valid."""
        os.close(self._fd)


class SegmentPool:
    """Segments that are used again: filling fresh memory costs ten times as much as filling warm memory.

    Args:
        keep_bytes: of free segments; the longest unused are closed beyond it.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free: list[Segment] = []

    def take(self, nbytes: int) -> Segment:
        """A segment of at least `nbytes`; its memory holds anything."""
        fitting = [segment for segment in self._free if nbytes <= segment.capacity <= max(4 * nbytes, _PAGE)]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.capacity)
            self._free.remove(segment)
            return segment
        # Some room, so that the next, slightly larger batch finds this one warm.
        return Segment((nbytes + nbytes // 4 + _PAGE - 1) // _PAGE * _PAGE)

    def give(self, segment: Segment) -> None:
        """Take a segment back."""
        self._free.append(segment)
        while sum(segment.capacity for segment in self._free) > self._keep_bytes:
            self._free.pop(0).close()

    def close(self) -> None:
        """Close the free segments."""
        while self._free:
            self._free.pop().close()


class SegmentMaps:
    """A consumer's read-only maps, kept so that a reused segment is mapped once."""

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._maps: dict[bytes, mmap.mmap] = {}

    def view(self, ref: SegmentRef | None, nbytes: int) -> memoryview:
        """The first `nbytes` of a segment's parcel, read-only.

        Raises:
            SegmentUnreachable: it cannot be opened here, or what is there now is another segment.
        """
        if ref is None:
            raise SegmentUnreachable("its producer took this process for one of another node")
        found = self._maps.pop(ref.nonce, None)
        if found is None:
            found = self._open(ref)
        self._maps[ref.nonce] = found  # the newest last
        while len(self._maps) > self._keep:
            self._maps.pop(next(iter(self._maps)))
        return memoryview(found)[DATA_AT : DATA_AT + nbytes]

    def _open(self, ref: SegmentRef) -> mmap.mmap:
        if ref.boot_id != boot_id():
            raise SegmentUnreachable("it is on another node")
        try:
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentUnreachable(f"process {ref.pid} cannot be reached: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (ref.inode, ref.size):
                raise SegmentUnreachable(f"descriptor {ref.fd} of process {ref.pid} is another file by now")
            mapped = mmap.mmap(fd, ref.size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        if mapped[: len(ref.nonce)] != ref.nonce:
            raise SegmentUnreachable(f"descriptor {ref.fd} of process {ref.pid} is another segment by now")
        return mapped
