"""A sample that has ended: checked, and turned into columns."""

from __future__ import annotations

import numpy as np

from miles_hpc.rollout.sample import Sample
from miles_hpc.transport.batch import SampleArrays
from miles_hpc.transport.columns import encode_text


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
    try:
        token_ids = np.array(sample.token_ids, np.int32)
        loss_mask = np.array(sample.loss_mask, np.uint8)
        logprobs = np.array(sample.logprobs, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSample(f"{where} has columns of mixed types: {error}; expected plain numbers") from error
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
        extra={name: np.asarray(column) for name, column in sample.extra.items()},
    )
