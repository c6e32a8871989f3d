"""A sample that has ended: checked, and turned into columns."""

from __future__ import annotations

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
    token_ids = _numbers(where, "token_ids", sample.token_ids, "iu", 2**31 - 1).astype(np.int32)
    loss_mask = _numbers(where, "loss_mask", sample.loss_mask, "biu", 1).astype(np.uint8)
    logprobs = _numbers(where, "logprobs", sample.logprobs, "fiu").astype(np.float32)
    extra = {name: _numbers(where, name, column, "biuf") for name, column in sample.extra.items()}
    spans = _numbers(where, "versions", sample.versions or [(0, 0, 0)], "iu")
    if spans.shape[1:] != (3,) or (spans[:, 1] > spans[:, 2]).any() or spans[:, 2].max() > tokens:
        raise InvalidSample(
            f"{where} has versions {sample.versions!r:.80}; expected (weight version, first token, end token) of its "
            f"{tokens} tokens"
        )
    logprobs[loss_mask == 0] = 0.0
    finite = np.isfinite(logprobs)
    if not finite.all():
        raise InvalidSample(f"{where} has a log-prob that is not finite at token {int(np.argmin(finite))}")
    return SampleArrays(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        reward=float("nan") if sample.reward is None else sample.reward,
        versions=sample.versions,
        status=sample.status,
        sample_index=sample.index,
        prompt_index=sample.prompt_index,
        texts={"response": encode_text(sample.response)},
        extra=extra,
    )


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
