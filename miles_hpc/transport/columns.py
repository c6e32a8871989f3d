"""Named numpy columns as message frames: a small msgpack header, then one frame of raw bytes per column.

Nothing is copied in either direction: frames view the arrays, and decoded arrays view the frames. Bytes are little
endian; NaN and infinities pass as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

MAJOR = 1
"""Readers refuse another major version."""
MINOR = 0
"""Grows with each appended column or header field; readers of an older one keep what they do not know."""

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]


class SchemaError(ValueError):
    """Frames that are not columns of the expected kind; the text says what was expected and found."""


class Column(msgspec.Struct, frozen=True):
    """One column in a header: its name, numpy type (`<i4`) and shape. Its bytes are the frame at the same position."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Frame 0. Append-only, new fields have defaults."""

    kind: str
    major: int = MAJOR
    minor: int = MINOR
    columns: list[Column]
    meta: dict[str, Any] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def little_endian(array: Array) -> Array:
    """The array as contiguous little-endian data; itself where it is that already."""
    dtype = array.dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype=dtype)


def encode_columns(kind: str, columns: Mapping[str, Array], meta: Mapping[str, Any] | None = None) -> list[Buffer]:
    """Frames of these columns; all but the first view the arrays, which must not change while they are sent.

    Raises:
        SchemaError: a column is not numeric.
    """
    arrays: dict[str, Array] = {}
    for name, array in columns.items():
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"column {name!r} of a {kind} has type {array.dtype}; expected numbers")
        arrays[name] = little_endian(array)
    header = Header(
        kind=kind,
        columns=[Column(name, array.dtype.str, array.shape) for name, array in arrays.items()],
        meta=dict(meta or {}),
    )
    # An empty array has no buffer that can be cast to bytes.
    bodies: list[Buffer] = [array.data.cast("B") if array.size else b"" for array in arrays.values()]
    return [_encoder.encode(header), *bodies]


def decode_columns(kind: str, frames: Sequence[Buffer]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Columns by name, as read-only views of the frames, and the header's `meta`.

    Raises:
        SchemaError: the frames hold another kind, another major version, or columns of the wrong size.
    """
    if not frames:
        raise SchemaError(f"no frames; expected a {kind}")
    try:
        header = _decoder.decode(frames[0])
    except msgspec.MsgspecError as error:
        raise SchemaError(f"frame 0 is not the header of a {kind}: {error}") from error
    if header.kind != kind:
        raise SchemaError(f"frames hold a {header.kind!r}; expected a {kind!r}")
    if header.major != MAJOR:
        raise SchemaError(f"{kind} of schema version {header.major}.{header.minor}; this program reads {MAJOR}.x")
    if len(frames) - 1 != len(header.columns):
        raise SchemaError(f"{kind} with {len(header.columns)} columns came with {len(frames) - 1} frames for them")
    columns: dict[str, Array] = {}
    for column, frame in zip(header.columns, frames[1:], strict=True):
        columns[column.name] = _view(kind, column, frame)
    return columns, header.meta


def _view(kind: str, column: Column, frame: Buffer) -> Array:
    where = f"column {column.name!r} of a {kind}"
    try:
        dtype = np.dtype(column.dtype)
    except TypeError as error:
        raise SchemaError(f"{where} has type {column.dtype!r}, which numpy does not know") from error
    if dtype.kind not in "biuf" or any(extent < 0 for extent in column.shape):
        raise SchemaError(f"{where} has type {dtype} and shape {column.shape}; expected numbers")
    expected = dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
    found = memoryview(frame).nbytes
    if found != expected:
        raise SchemaError(f"{where} has {found} bytes; expected {expected} for {column.dtype} {column.shape}")
    if not expected:
        return np.zeros(column.shape, dtype)
    view = np.frombuffer(frame, dtype).reshape(column.shape)
    view.flags.writeable = False
    return view


def pack_texts(texts: Sequence[str]) -> tuple[Array, Array]:
    """Texts as offsets `[n + 1] int64` and one blob `[bytes] uint8`, UTF-8; lone surrogates survive."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    blob = np.frombuffer(b"".join(encoded), np.uint8)
    return offsets_of([len(item) for item in encoded]), blob


def unpack_text(offsets: Array, blob: Array, index: int) -> str:
    """Text `index` of a blob column; bytes that do not decode become U+FFFD."""
    data = blob[int(offsets[index]) : int(offsets[index + 1])].tobytes()
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def offsets_of(lengths: Sequence[int] | Array) -> Array:
    """`[n + 1] int64`: 0 and the running sum of `lengths`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.asarray(lengths, np.int64), out=offsets[1:])
    return offsets


def flat_index(offsets: Array, rows: Array) -> Array:
    """Positions in a flat column of the items of `rows` in that order, without a loop over rows. `[items] int64`."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions: Array = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return positions
