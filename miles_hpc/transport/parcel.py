"""A parcel: named columns in one piece of memory, so that they lie in a shared segment, a file or an arena as they are.

Layout: length of the header as uint32, the header as msgpack, then each column at a multiple of 64 bytes. The same
bytes serve every carrier. Numbers are little endian; NaN and infinities pass as they are.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from miles_hpc.transport.columns import MAJOR, MINOR, Array, Buffer, SchemaError, little_endian

ALIGN = 64
_HEAD = struct.Struct("<I")


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where a column lies: its numpy type (`<i4`), shape, and offset behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class ParcelHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Append-only, new fields have defaults."""

    kind: str
    major: int = MAJOR
    minor: int = MINOR
    columns: list[Placed]
    meta: dict[str, Any] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ParcelHeader).decode
_JOIN_BELOW = 16 * 1024
_STEP = 1 << 20
_dtype = functools.lru_cache(maxsize=64)(np.dtype)


class Packing:
    """Columns that are about to be written into one piece of memory; nothing is copied before `write`.

    Args:
        columns: name -> an array, or arrays that are laid one behind the other along the first axis.

    Raises:
        SchemaError: a column is not numeric, or its parts have different types or widths.
    """

    def __init__(
        self, kind: str, columns: Mapping[str, Array | Sequence[Array]], meta: Mapping[str, Any] | None = None
    ) -> None:
        self._parts: list[tuple[int, list[Array]]] = []
        placed: list[Placed] = []
        end = 0
        for name, column in columns.items():
            parts = [column] if isinstance(column, np.ndarray) else list(column)
            first = _common(kind, name, parts)
            shape = first.shape if len(parts) == 1 else (sum(map(len, parts)), *first.shape[1:])
            placed.append(Placed(name, _little(first.dtype), shape, end))
            self._parts.append((end, parts))
            end = _aligned(end + first.dtype.itemsize * math.prod(shape))
        header = _encode(ParcelHeader(kind=kind, columns=placed, meta=dict(meta or {})))
        self._head = _HEAD.pack(len(header)) + header
        self._placed = placed
        self._base = _aligned(len(self._head))
        self.nbytes = self._base + end
        """Size of the parcel."""

    def write(self, into: memoryview) -> None:
        """Lay the parcel out in `into`, which must hold `nbytes`; each byte is copied once."""
        for _ in self.writing(into):
            pass

    def writing(self, into: memoryview, step: int = _STEP) -> Iterator[int]:
        """As `write`, from the front to the back: yields, about every `step` bytes, how many are written."""
        into[: len(self._head)] = self._head
        yield self._base
        for column, (offset, parts) in zip(self._placed, self._parts, strict=True):
            dtype = _dtype(column.dtype)
            count = math.prod(column.shape)
            if not count:
                continue
            start = self._base + offset
            target = np.frombuffer(into, dtype, count, start).reshape(column.shape)
            width = dtype.itemsize * count // len(target)
            done = 0
            for pieces in _steps(parts, max(1, step // width)):
                rows = sum(map(len, pieces))
                if len(pieces) == 1:
                    target[done : done + rows] = pieces[0]
                else:
                    np.concatenate(pieces, out=target[done : done + rows])
                done += rows
                yield start + done * width
        yield self.nbytes

    def to_bytes(self) -> bytes | bytearray:
        """The parcel in memory of its own."""
        if self.nbytes < _JOIN_BELOW:
            return self._joined()
        memory = bytearray(self.nbytes)
        self.write(memoryview(memory))
        return memory

    def _joined(self) -> bytes:
        # Views of a target cost more than the copies of a small parcel.
        pieces, end = [self._head], len(self._head)
        for offset, parts in self._parts:
            pieces.append(bytes(self._base + offset - end))
            body = b"".join([little_endian(part).tobytes() for part in parts])
            pieces.append(body)
            end = self._base + offset + len(body)
        pieces.append(bytes(self.nbytes - end))
        return b"".join(pieces)


def _steps(parts: Sequence[Array], rows: int) -> Iterator[Sequence[Array]]:
    """The same rows in order, about so many at a time."""
    few: list[Array] = []
    held = 0
    for part in parts:
        if len(part) > 2 * rows:
            if few:
                yield few
                few, held = [], 0
            yield from ([part[start : start + rows]] for start in range(0, len(part), rows))
            continue
        few.append(part)
        held += len(part)
        if held >= rows:
            yield few
            few, held = [], 0
    if few:
        yield few


def read_parcel(kind: str, memory: Buffer) -> tuple[dict[str, Array], dict[str, Any]]:
    """Columns by name, as read-only views of `memory`, and the header's `meta`.

    Raises:
        SchemaError: it holds another kind, another major version, or columns that reach beyond its end.
    """
    view = memoryview(memory).cast("B") if not isinstance(memory, memoryview) or memory.format != "B" else memory
    if len(view) < _HEAD.size or len(view) < _HEAD.size + _HEAD.unpack_from(view)[0]:
        raise SchemaError(f"{len(view)} bytes are no parcel; expected a {kind}")
    length = _HEAD.size + _HEAD.unpack_from(view)[0]
    try:
        header = _decode(view[_HEAD.size : length])
    except msgspec.MsgspecError as error:
        raise SchemaError(f"the header of a {kind} does not decode: {error}") from error
    if header.kind != kind:
        raise SchemaError(f"a parcel holds a {header.kind!r}; expected a {kind!r}")
    if header.major != MAJOR:
        raise SchemaError(f"{kind} of schema version {header.major}.{header.minor}; this program reads {MAJOR}.x")
    base = _aligned(length)
    return {column.name: _view(kind, column, view, base) for column in header.columns}, header.meta


def _view(kind: str, column: Placed, memory: memoryview, base: int) -> Array:
    where = f"column {column.name!r} of a {kind}"
    try:
        dtype = _dtype(column.dtype)
    except TypeError as error:
        raise SchemaError(f"{where} has type {column.dtype!r}, which numpy does not know") from error
    if dtype.kind not in "biuf" or column.offset < 0 or any(extent < 0 for extent in column.shape):
        raise SchemaError(f"{where} has type {dtype}, shape {column.shape}; expected numbers")
    count = math.prod(column.shape)
    if not count:
        return np.zeros(column.shape, dtype)
    if base + column.offset + count * dtype.itemsize > len(memory):
        raise SchemaError(f"{where} ends beyond the {len(memory)} bytes of its parcel")
    array = np.frombuffer(memory, dtype, count, base + column.offset)
    if len(column.shape) != 1:
        array = array.reshape(column.shape)
    array.flags.writeable = False
    return array


def _common(kind: str, name: str, parts: Sequence[Array]) -> Array:
    if not parts:
        raise SchemaError(f"column {name!r} of a {kind} has no parts; give an empty array for its type")
    first = parts[0]
    if first.dtype.kind not in "biuf":
        raise SchemaError(f"column {name!r} of a {kind} has type {first.dtype}; expected numbers")
    dtype, flat = first.dtype, first.ndim == 1
    for part in parts[1:]:
        if flat and part.dtype is dtype and part.ndim == 1:
            continue  # quicker than the comparisons below, which a batch of many samples would feel
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            raise SchemaError(
                f"column {name!r} of a {kind} has parts of {first.dtype} {first.shape[1:]} and {part.dtype} "
                f"{part.shape[1:]}; expected one type and width"
            )
    return little_endian(first) if first.dtype.byteorder == ">" else first


@functools.lru_cache(maxsize=64)
def _little(dtype: np.dtype[Any]) -> str:
    return str(dtype.newbyteorder("<").str)


def _aligned(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN
