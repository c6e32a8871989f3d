"""RolloutBatch: many samples as one array per field; after a sample has ended no token is touched in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from miles_hpc.transport.columns import (
    Array,
    Buffer,
    SchemaError,
    flat_index,
    offsets_of,
    text_parts,
    unpack_text,
)
from miles_hpc.transport.parcel import Packing, read_parcel

KIND = "rollout_batch"

STATUSES = ("completed", "truncated", "aborted", "failed")
"""Names of the codes in `status`; append-only."""

_TOKEN_COLUMNS = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
_SAMPLE_COLUMNS = {"rewards": np.float32, "sample_index": np.int64, "prompt_index": np.int64, "status": np.uint8}
_DTYPES = {name: np.dtype(dtype) for name, dtype in (_TOKEN_COLUMNS | _SAMPLE_COLUMNS).items()}
_EMPTY = {name: np.zeros(0, dtype) for name, dtype in _TOKEN_COLUMNS.items()}
_FLAT = ("offsets", "span_offsets", "spans", *_TOKEN_COLUMNS, *_SAMPLE_COLUMNS)


class LengthMismatch(ValueError):
    """Fields of one sample that must be equally long are not; the text names the sample by its index."""


class SampleArrays(msgspec.Struct, frozen=True, eq=False):
    """One finished sample, the unit that is packed.

    `token_ids` are prompt and response; `loss_mask` (1 where the policy generated) and `logprobs` (0 where it did not)
    have the same length. `versions` are (weight version, first token, end token) over the same positions.
    """

    token_ids: Sequence[int] | Array
    loss_mask: Sequence[int] | Array
    logprobs: Sequence[float] | Array
    reward: float
    versions: Sequence[tuple[int, int, int]] = ()
    status: str = "completed"
    sample_index: int = 0
    prompt_index: int = 0
    texts: Mapping[str, str | bytes] = {}
    """Bytes are UTF-8 already."""
    extra: Mapping[str, Array] = {}
    """Further per-token arrays, `[tokens, ...]`, e.g. routed experts int32."""

    @property
    def layout(self) -> tuple[Any, ...]:
        """Equal for samples that can be packed together."""
        if not self.extra:
            return tuple(self.texts)
        return (*self.texts, *((name, array.dtype.str, array.shape[1:]) for name, array in self.extra.items()))

    @property
    def nbytes(self) -> int:
        """About the size of the sample in a parcel."""
        texts = sum(len(text) for text in self.texts.values())
        extra = sum(array.nbytes for array in self.extra.values())
        return 9 * len(self.token_ids) + 64 + texts + extra


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """`n` samples with `t` tokens in all. Arrays are shared, never changed in place.

    Raises:
        SchemaError: columns that do not fit together.
    """

    token_ids: Array
    """`[t] int32`."""
    offsets: Array
    """`[n + 1] int64`: sample i is `token_ids[offsets[i]:offsets[i + 1]]`."""
    loss_mask: Array
    """`[t] uint8`: 1 where the policy generated the token and it counts."""
    logprobs: Array
    """`[t] float32`: of the engine that generated the token; 0 elsewhere."""
    rewards: Array
    """`[n] float32`."""
    sample_index: Array
    """`[n] int64`: which sample of its prompt."""
    prompt_index: Array
    """`[n] int64`: row of the data set."""
    status: Array
    """`[n] uint8`: index into STATUSES."""
    span_offsets: Array
    """`[n + 1] int64` into `spans`."""
    spans: Array
    """`[s, 3] int64`: weight version, first token, end token; token positions count from the sample's start."""
    texts: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    """Name -> offsets `[n + 1] int64` and blob `uint8`."""
    extra: Mapping[str, Array] = field(default_factory=dict)
    """Name -> `[t, ...]`: further per-token arrays."""

    def __post_init__(self) -> None:
        _check_offsets("offsets", self.offsets, len(self.token_ids))
        _check_offsets("span_offsets", self.span_offsets, len(self.spans))
        if self.spans.ndim != 2 or self.spans.shape[1] != 3:
            raise SchemaError(f"spans have shape {self.spans.shape}; expected [s, 3]")
        tokens, samples = len(self.token_ids), len(self)
        per_token = {name: getattr(self, name) for name in _TOKEN_COLUMNS} | {
            f"extra.{k}": v for k, v in self.extra.items()
        }
        for name, column in per_token.items():
            if len(column) != tokens:
                raise SchemaError(f"column {name} has {len(column)} rows; the batch has {tokens} tokens")
        for name in ("span_offsets", *_SAMPLE_COLUMNS):
            rows = len(getattr(self, name)) - (name == "span_offsets")
            if rows != samples:
                raise SchemaError(f"column {name} has {rows} rows; the batch has {samples} samples")
        for name, (text_offsets, blob) in self.texts.items():
            _check_offsets(f"text.{name}", text_offsets, len(blob))
            if len(text_offsets) - 1 != samples:
                raise SchemaError(f"text {name} has {len(text_offsets) - 1} rows; the batch has {samples} samples")

    def __len__(self) -> int:
        """Samples."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """`[n] int64`: tokens of each sample."""
        lengths: Array = np.diff(self.offsets)
        return lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(array.nbytes for array in self.columns().values())

    def text(self, name: str, index: int) -> str:
        """One text, e.g. `response`; bytes that do not decode become U+FFFD.

        Raises:
            KeyError: there is no such column.
        """
        return unpack_text(*self.texts[name], index)

    @classmethod
    def pack(cls, samples: Sequence[SampleArrays]) -> RolloutBatch:
        """Samples to columns.

        Raises:
            LengthMismatch: mask, log-probs or an extra array of a sample are not as long as its tokens.
            SchemaError: samples differ in their extra columns or texts, or a status has no code.
        """
        check_samples(samples)
        columns = {
            name: part
            if isinstance(part, np.ndarray)
            else np.concatenate([_EMPTY[name], *part] if name in _EMPTY else part)
            for name, part in _columns_of(samples).items()
        }
        return cls._of_columns(columns)

    @staticmethod
    def packing_of(samples: Sequence[SampleArrays]) -> Packing:
        """The parcel of `pack(samples)`, with each token copied once. The samples went through `check_samples`."""
        columns = _columns_of(samples)
        for name, empty in _EMPTY.items():
            columns[name] = columns[name] or [empty]
        return Packing(KIND, columns)

    @classmethod
    def concat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """All samples of `batches`, in order.

        Raises:
            SchemaError: batches differ in their extra or text columns, or in the type of one.
        """
        if not batches:
            return cls.pack([])
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        for batch in batches[1:]:
            if set(batch.extra) != set(first.extra) or set(batch.texts) != set(first.texts):
                raise SchemaError(
                    f"batches differ in columns: {sorted([*first.extra, *first.texts])} and "
                    f"{sorted([*batch.extra, *batch.texts])}"
                )
            for name in first.extra:
                if batch.extra[name].dtype != first.extra[name].dtype:
                    raise SchemaError(
                        f"column {name!r} has types {first.extra[name].dtype} and {batch.extra[name].dtype}; "
                        f"expected one"
                    )
        return cls(
            offsets=_concat_offsets([batch.offsets for batch in batches]),
            span_offsets=_concat_offsets([batch.span_offsets for batch in batches]),
            spans=np.concatenate([batch.spans for batch in batches]),
            texts={
                name: (
                    _concat_offsets([batch.texts[name][0] for batch in batches]),
                    np.concatenate([batch.texts[name][1] for batch in batches]),
                )
                for name in first.texts
            },
            extra={name: np.concatenate([batch.extra[name] for batch in batches]) for name in first.extra},
            **{
                name: np.concatenate([getattr(batch, name) for batch in batches])
                for name in (*_TOKEN_COLUMNS, *_SAMPLE_COLUMNS)
            },
        )

    def slice(self, start: int, stop: int) -> RolloutBatch:
        """Samples `start` to `stop`, as views.

        Raises:
            IndexError: the bounds are outside the batch or in the wrong order.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"slice {start}:{stop} of a batch of {len(self)} samples")
        tokens = slice(int(self.offsets[start]), int(self.offsets[stop]))
        spans = slice(int(self.span_offsets[start]), int(self.span_offsets[stop]))
        rows = slice(start, stop)
        return RolloutBatch(
            offsets=self.offsets[start : stop + 1] - self.offsets[start],
            span_offsets=self.span_offsets[start : stop + 1] - self.span_offsets[start],
            spans=self.spans[spans],
            texts={
                name: (offsets[start : stop + 1] - offsets[start], blob[int(offsets[start]) : int(offsets[stop])])
                for name, (offsets, blob) in self.texts.items()
            },
            extra={name: column[tokens] for name, column in self.extra.items()},
            **{name: getattr(self, name)[tokens] for name in _TOKEN_COLUMNS},
            **{name: getattr(self, name)[rows] for name in _SAMPLE_COLUMNS},
        )

    def take(self, rows: Sequence[int] | Array) -> RolloutBatch:
        """Samples `rows` in that order, copied, without a loop over samples."""
        index = np.asarray(rows, np.int64)
        tokens = flat_index(self.offsets, index)
        return RolloutBatch(
            offsets=offsets_of(np.diff(self.offsets)[index]),
            span_offsets=offsets_of(np.diff(self.span_offsets)[index]),
            spans=self.spans[flat_index(self.span_offsets, index)],
            texts={
                name: (offsets_of(np.diff(offsets)[index]), blob[flat_index(offsets, index)])
                for name, (offsets, blob) in self.texts.items()
            },
            extra={name: column[tokens] for name, column in self.extra.items()},
            **{name: getattr(self, name)[tokens] for name in _TOKEN_COLUMNS},
            **{name: getattr(self, name)[index] for name in _SAMPLE_COLUMNS},
        )

    def split(self, rank: int, size: int) -> RolloutBatch:
        """Samples rank, rank + size, rank + 2 · size …"""
        return self.take(np.arange(rank, len(self), size, dtype=np.int64))

    def columns(self) -> dict[str, Array]:
        """Every array by its name in a parcel."""
        columns = {name: getattr(self, name) for name in _FLAT}
        for name, (offsets, blob) in self.texts.items():
            columns[f"text.{name}.offsets"] = offsets
            columns[f"text.{name}.blob"] = blob
        for name, array in self.extra.items():
            columns[f"extra.{name}"] = array
        return columns

    def packing(self) -> Packing:
        """The batch as a parcel that is not yet written; the arrays must not change before that."""
        return Packing(KIND, self.columns())

    @classmethod
    def from_parcel(cls, memory: Buffer) -> RolloutBatch:
        """A batch whose arrays are read-only views of the parcel. Columns of a newer minor version are left out.

        Raises:
            SchemaError: the memory holds no batch of this major version.
        """
        columns, _ = read_parcel(KIND, memory)
        missing = [name for name in _FLAT if name not in columns]
        if missing:
            raise SchemaError(f"a {KIND} lacks the columns {missing}")
        for name, dtype in _DTYPES.items():
            if columns[name].dtype != dtype:
                raise SchemaError(f"column {name!r} has type {columns[name].dtype}; expected {dtype}")
        return cls._of_columns(columns)

    @classmethod
    def _of_columns(cls, columns: Mapping[str, Array]) -> RolloutBatch:
        texts, extra = {}, {}
        for name in columns:
            if name.startswith("text.") and name.endswith(".offsets"):
                text = name[len("text.") : -len(".offsets")]
                texts[text] = columns[name], columns[f"text.{text}.blob"]
            elif name.startswith("extra."):
                extra[name[len("extra.") :]] = columns[name]
        return cls(texts=texts, extra=extra, **{name: columns[name] for name in _FLAT})


def check_samples(samples: Sequence[SampleArrays]) -> None:
    """What `RolloutBatch.pack` raises for these samples, if anything.

    Raises:
        LengthMismatch, SchemaError: see there.
    """
    for index, sample in enumerate(samples):
        _check_sample(index, sample, samples[0])


def _columns_of(samples: Sequence[SampleArrays]) -> dict[str, Any]:
    """Columns by name; those of tokens as one part for each sample."""
    columns: dict[str, Any] = {
        "offsets": offsets_of([len(sample.token_ids) for sample in samples]),
        "span_offsets": offsets_of([len(sample.versions) for sample in samples]),
        "spans": np.array([span for sample in samples for span in sample.versions], np.int64).reshape(-1, 3),
        "rewards": np.array([sample.reward for sample in samples], np.float32),
        "sample_index": np.array([sample.sample_index for sample in samples], np.int64),
        "prompt_index": np.array([sample.prompt_index for sample in samples], np.int64),
        "status": np.array([STATUSES.index(sample.status) for sample in samples], np.uint8),
    }
    for name, dtype in _TOKEN_COLUMNS.items():
        columns[name] = [np.asarray(getattr(sample, name), dtype) for sample in samples]
    if samples:
        for name in samples[0].texts:
            texts = [sample.texts[name] for sample in samples]
            columns[f"text.{name}.offsets"], columns[f"text.{name}.blob"] = text_parts(texts)
        for name in samples[0].extra:
            columns[f"extra.{name}"] = [np.asarray(sample.extra[name]) for sample in samples]
    return columns


def _check_offsets(name: str, offsets: Array, end: int) -> None:
    if offsets.ndim == 1 and len(offsets) < 16:
        few = offsets.tolist()  # quicker than numpy's reductions
        if few and few[0] == 0 and few[-1] == end and few == sorted(few):
            return
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise SchemaError(f"{name} must rise from 0 to {end}; found {offsets[:3]} … {offsets[-1:]}")


def _concat_offsets(parts: Sequence[Array]) -> Array:
    return offsets_of(np.concatenate([np.diff(part) for part in parts]))


def _check_sample(index: int, sample: SampleArrays, first: SampleArrays) -> None:
    tokens = len(sample.token_ids)
    if not tokens == len(sample.loss_mask) == len(sample.logprobs) or sample.extra:
        lengths = {"loss_mask": len(sample.loss_mask), "logprobs": len(sample.logprobs)}
        lengths |= {f"extra {name!r}": len(array) for name, array in sample.extra.items()}
        for name, length in lengths.items():
            if length != tokens:
                raise LengthMismatch(
                    f"sample {index} has {tokens} tokens but {name} has {length}; they must be equally long"
                )
    if sample.texts.keys() != first.texts.keys() or sample.extra.keys() != first.extra.keys():
        raise SchemaError(
            f"sample {index} has columns {sorted([*sample.texts, *sample.extra])}, sample 0 has "
            f"{sorted([*first.texts, *first.extra])}; expected the same"
        )
    for name, array in sample.extra.items():
        mine, theirs = np.asarray(array), np.asarray(first.extra[name])
        if mine.dtype != theirs.dtype or mine.shape[1:] != theirs.shape[1:] or mine.dtype.kind not in "biuf":
            raise SchemaError(
                f"sample {index} has {name!r} of type {mine.dtype} {mine.shape[1:]}, sample 0 of {theirs.dtype} "
                f"{theirs.shape[1:]}; expected numbers of one type and width"
            )
    if sample.status not in STATUSES:
        raise SchemaError(f"sample {index} has status {sample.status!r}; expected one of {STATUSES}")
    for version, start, end in sample.versions:
        if not 0 <= start <= end <= tokens:
            raise LengthMismatch(f"sample {index}: version {version} spans {start}:{end} of {tokens} tokens")
