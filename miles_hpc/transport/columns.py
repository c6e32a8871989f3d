"""What columns are made of: flat arrays, offsets into them, and texts as blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAJOR = 1
"""Readers refuse another major version."""
MINOR = 0
"""Grows with each appended column or header field; readers of an older one keep what they do not know."""

_JOIN_BELOW = 256 * 1024
"""Views of many small texts cost more than a copy of them."""

_BYTES = np.dtype(np.uint8)

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]


class SchemaError(ValueError):
    """Data that is not columns of the expected kind; the text says what was expected and found."""


def little_endian(array: Array) -> Array:
    """The array as contiguous little-endian data; itself where it is that already."""
    dtype = array.dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype=dtype)


def encode_text(text: str) -> bytes:
    """UTF-8; lone surrogates survive."""
    return text.encode("utf-8", "surrogatepass")


def text_parts(texts: Sequence[str | bytes]) -> tuple[Array, list[Array]]:
    """Texts as offsets `[n + 1] int64` and the parts of one blob, each `[bytes] uint8`; bytes are taken as they are."""
    encoded = [encode_text(text) if isinstance(text, str) else text for text in texts]
    offsets = offsets_of([len(item) for item in encoded])
    if offsets[-1] < _JOIN_BELOW:
        return offsets, [np.frombuffer(b"".join(encoded), _BYTES)]
    return offsets, [np.frombuffer(item, _BYTES) for item in encoded]


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
