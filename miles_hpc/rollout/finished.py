"""A sample that has ended: checked, and turned into columns."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from miles_hpc.rollout.sample import Sample
from miles_hpc.transport.batch import SampleArrays
from miles_hpc.transport.columns import Array, encode_text


class InvalidSample(ValueError):
    """A generate function returned a sample that cannot be trained on; the text names it by its index."""


def checked_arrays(sample: Sample) -> SampleArrays:
    """The columns of a sample that has ended: from here on no token is touched in Python.

    Raises:
        InvalidSample: its columns do not fit together, or a log-prob that counts is not finite.
    """
    where = f"sample {sample.index} of group {sample.group}"
    tokens = len(sample.token_ids)
    if not tokens:
        raise InvalidSample(f"{where} has no tokens, not even a prompt: its generate function did not fill it")
    columns = (("loss_mask", sample.loss_mask), ("logprobs", sample.logprobs), *sample.extra.items())
    for name, column in columns:
        if len(column) != tokens:
            raise InvalidSample(f"{where} has {tokens} tokens but {name} has {len(column)}; expected {tokens}")
    if sample.status not in ("completed", "truncated"):
        raise InvalidSample(f"{where} has status {sample.status!r}; expected completed or truncated")
    token_ids = _as_integers(where, "token_ids", sample.token_ids)
    loss_mask = _as_mask(where, "loss_mask", sample.loss_mask)
    logprobs = _as_floats(where, "logprobs", sample.logprobs)
    extra = {name: _numbers(where, name, column, "biuf") for name, column in sample.extra.items()}
    versions: Any = sample.versions
    if not _are_spans(versions, tokens):
        versions = _as_spans(where, versions, tokens)
    logprobs[loss_mask == 0] = 0.0
    # One number that is not finite makes the sum so.
    if not math.isfinite(np.add.reduce(logprobs)) and not (finite := np.isfinite(logprobs)).all():
        raise InvalidSample(f"{where} has a log-prob that is not finite at token {int(np.argmin(finite))}")
    return SampleArrays(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        reward=float("nan") if sample.reward is None else sample.reward,
        versions=versions,
        status=sample.status,
        sample_index=sample.index,
        prompt_index=sample.prompt_index,
        texts={"response": encode_text(sample.response)},
        extra=extra,
    )


# Lists go through `struct` and `bytearray`, which take whole numbers and floats as strictly as is needed, at a third of
# numpy's time. What they refuse, and whatever is no list, is left to `_numbers`, which says what is wrong with it.


def _as_integers(where: str, name: str, column: Any) -> Array:
    if type(column) is list:
        try:
            found = np.frombuffer(struct.pack(f"{len(column)}i", *column), np.int32)
        except struct.error:
            pass
        else:
            if np.maximum.reduce(found.view(np.uint32)) < 2**31:  # none is negative
                return found
    return _numbers(where, name, column, "iu", 2**31 - 1).astype(np.int32)


def _as_mask(where: str, name: str, column: Any) -> Array:
    if type(column) is list:
        try:
            found = np.frombuffer(bytearray(column), np.uint8)
        except (TypeError, ValueError):
            pass
        else:
            if np.maximum.reduce(found) <= 1:
                return found
    return _numbers(where, name, column, "biu", 1).astype(np.uint8)


def _as_floats(where: str, name: str, column: Any) -> Array:
    """A new array, which may be changed."""
    if type(column) is list:
        try:
            return np.frombuffer(bytearray(struct.pack(f"{len(column)}f", *column)), np.float32)
        except (struct.error, OverflowError):
            pass
    return _numbers(where, name, column, "fiu").astype(np.float32)


def _are_spans(versions: Any, tokens: int) -> bool:
    """Whether these are spans of `tokens` tokens in plain numbers; False also where it takes a closer look."""
    if type(versions) is not list:
        return False
    for span in versions:
        if type(span) is not tuple or [*map(type, span)] != [int, int, int] or not 0 <= span[1] <= span[2] <= tokens:
            return False
        if not -(2**63) <= span[0] < 2**63:
            return False
    return True


def _as_spans(where: str, versions: Any, tokens: int) -> list[tuple[int, ...]]:
    """Spans that are no list of plain tuples, such as an array `[spans, 3]`."""
    if isinstance(versions, tuple | np.ndarray) and not np.size(versions):
        return []  # whatever numpy takes the type of nothing for
    spans = _numbers(where, "versions", versions, "iu")
    if (
        spans.shape[1:] != (3,)
        or spans[:, 0].max() >= 2**63
        or spans[:, 1].min() < 0
        or (spans[:, 1] > spans[:, 2]).any()
        or spans[:, 2].max() > tokens
    ):
        raise InvalidSample(
            f"{where} has versions {versions!r:.80}; expected (weight version, first token, end token) of "
            f"its {tokens} tokens"
        )
    return [tuple(span) for span in spans.tolist()]


def _numbers(where: str, name: str, column: Any, kinds: str, most: int | None = None) -> Array:
    """A column as an array of one of these kinds of numbers, from 0 to `most` where that is said."""
    try:
        found: Array = np.asarray(column)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSample(f"{where}: {name} is no column of numbers: {error}") from error
    if found.dtype.kind not in kinds:
        raise InvalidSample(
            f"{where} has {name} of mixed or wrong types (together {found.dtype}); expected "
            f"{'numbers' if 'f' in kinds else 'whole numbers'}"
        )
    if most is not None and len(found) and (found.min() < 0 or found.max() > most):
        place = int(np.argmax((found < 0) | (found > most)))
        raise InvalidSample(f"{where} has {name}[{place}] = {found[place]}; expected 0 to {most}")
    return found
