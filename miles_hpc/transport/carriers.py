"""How a parcel comes from its producer to its consumers: shared memory on one node, TCP between nodes, or a file.

The producer lays a parcel out once, in a segment of shared memory; the same bytes serve consumers on any node. What
travels in messages is the ParcelRef. A parcel is held until it is released, so it can be fetched again after a break.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from miles_hpc.transport.bulk import BulkClient, BulkServer
from miles_hpc.transport.parcel import Packing
from miles_hpc.transport.segments import (
    Segment,
    SegmentMaps,
    SegmentPool,
    SegmentRef,
    SegmentUnreachable,
    boot_id,
)
from miles_hpc.wire.address import HostAndPort

Carrier = Literal["auto", "shm", "tcp"]


class ParcelRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a parcel can be fetched. Holds the key of the bulk port: send it over encrypted connections only."""

    id: bytes
    nbytes: int
    segment: SegmentRef | None
    """None: it is laid out while it is pulled, so nobody can map it."""
    address: HostAndPort
    key: bytes


class _Held:
    """A parcel in a segment; all of it is written, or the first `written` bytes are."""

    def __init__(self, segment: Segment, packing: Packing) -> None:
        self.segment = segment
        self.nbytes = packing.nbytes
        self.memory = segment.memory[: packing.nbytes]
        self._packing: Packing | None = packing
        self._writing: Iterator[int] = packing.writing(self.memory)
        self._written = 0

    def write(self, upto: int) -> None:
        """Lay out at least the first `upto` bytes."""
        while self._packing is not None and self._written < min(upto, self.nbytes):
            try:
                self._written = next(self._writing, self.nbytes)
            except BaseException:
                # What has raised is at its end: asked again, it would say that nothing is left to write.
                self._writing, self._written = self._packing.writing(self.memory), 0
                raise
        if self._written >= self.nbytes:
            self._packing, self._writing = None, iter(())  # lets go of what it was written from


class Outbox:
    """The producer's end. Its methods may be called from any thread.

    Args:
        listen: of the bulk port.
        keep_bytes: of free segments that are kept warm.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, listen: HostAndPort, *, keep_bytes: int = 4 << 30) -> None:
        self._pool = SegmentPool(keep_bytes)
        self._held: dict[bytes, _Held] = {}
        self._lock = threading.Lock()
        self._key = os.urandom(32)
        self._server = BulkServer(listen, self._key, self._find)

    @property
    def address(self) -> HostAndPort:
        """Of the bulk port."""
        return self._server.address

    @property
    def held_bytes(self) -> int:
        """Of parcels that are not released."""
        with self._lock:
            return sum(held.nbytes for held in self._held.values())

    @property
    def held(self) -> int:
        """Parcels that are not released."""
        return len(self._held)

    def offer(self, packing: Packing, *, remote: bool = False) -> ParcelRef:
        """Hold a parcel until it is released.

        Args:
            remote: its consumer is on another node: the parcel is laid out part by part while it is pulled, from arrays
                that must not change until then.
        """
        with self._lock:
            segment = self._pool.take(packing.nbytes)
        held = _Held(segment, packing)
        if not remote:
            held.write(packing.nbytes)
        name = os.urandom(16)
        with self._lock:
            self._held[name] = held
        return ParcelRef(
            id=name,
            nbytes=packing.nbytes,
            segment=None if remote else segment.ref,
            address=self._server.address,
            key=self._key,
        )

    def release(self, ref: ParcelRef, *, reuse: bool = True) -> None:
        """Hold a parcel no longer. A repeat changes nothing.

        Args:
            reuse: every consumer is done, and the memory may be filled anew; otherwise it lives on unchanged for those
                that have mapped it.
        """
        with self._lock:
            found = self._held.pop(ref.id, None)
            if found is not None and reuse:
                self._pool.give(found.segment)
            elif found is not None:
                found.segment.close()

    def memory(self, ref: ParcelRef) -> memoryview | None:
        """The bytes of a parcel that is held."""
        return self._find(ref.id, ref.nbytes)

    def _find(self, name: bytes, upto: int) -> memoryview | None:
        # Under the lock: a parcel that is released in the middle is another's memory.
        with self._lock:
            found = self._held.get(name)
            if found is None:
                return None
            found.write(upto)
            return found.memory

    def close(self) -> None:
        """Stop serving and give all memory back."""
        self._server.close()
        with self._lock:
            for held in self._held.values():
                held.segment.close()
            self._held.clear()
            self._pool.close()


class Inbox:
    """The consumer's end; one thread at a time.

    A fetched parcel is valid until it is released here or by the producer, whichever comes first: shared segments and
    the arena of the TCP carrier are used again.

    Args:
        carrier: `auto` takes shared memory where it can be opened; the others are for measuring.
    """

    def __init__(self, carrier: Carrier = "auto") -> None:
        self._carrier = carrier
        self._maps = SegmentMaps()
        self._arena: memoryview | None = None
        self._in_arena: bytes = b""
        self._client: BulkClient | None = None

    @property
    def place(self) -> str:
        """Where parcels are mapped; a producer elsewhere need not lay them out before they are pulled."""
        return "" if self._carrier == "tcp" else boot_id()

    def fetch(self, ref: ParcelRef, timeout_s: float) -> memoryview:
        """The parcel's bytes, read-only.

        Raises:
            BulkError: see `BulkClient.pull`.
            SegmentUnreachable: only with the carrier `shm`.
        """
        if self._carrier != "tcp":
            try:
                return self._maps.view(ref.segment, ref.nbytes)
            except SegmentUnreachable:
                if self._carrier == "shm":
                    raise
        if self._client is None or (self._client.address, self._client.key) != (ref.address, ref.key):
            self.close()
            self._client = BulkClient(ref.address, ref.key)
        memory = self._memory(ref)
        self._client.pull(ref.id, memory, timeout_s)
        return memory.toreadonly()

    def _memory(self, ref: ParcelRef) -> memoryview:
        if self._arena is None or self._in_arena or not ref.nbytes <= len(self._arena) <= 4 * ref.nbytes:
            self._arena = memoryview(mmap.mmap(-1, max(1, ref.nbytes + ref.nbytes // 4)))
        self._in_arena = ref.id
        return self._arena[: ref.nbytes]

    def release(self, ref: ParcelRef) -> None:
        """The caller reads this parcel no longer."""
        if self._in_arena == ref.id:
            self._in_arena = b""

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None


def write_parcel(path: Path, packing: Packing) -> None:
    """A parcel as a file, in one rename: whoever sees it sees all of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with draft.open("w+b") as file:
            file.truncate(packing.nbytes)
            with mmap.mmap(file.fileno(), packing.nbytes) as mapped:
                view = memoryview(mapped)
                packing.write(view)
                view.release()
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def map_parcel(path: Path) -> memoryview:
    """A parcel's file as read-only memory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty.
    """
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
