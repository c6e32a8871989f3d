"""Shards of a rollout as padded or packed tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from miles_hpc.train.warm_data import Example

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """`b` samples, padded on the right to `t` tokens; or, with `positions`, all samples packed into one row of `t`.
    Row [i, j] of mask, log-probs and advantages speaks of predicting token j + 1.

    No attention mask goes with it: under causal attention no token sees the padding behind it, and a model that is
    given positions which begin again keeps the samples of a row apart.
    """

    token_ids: torch.Tensor
    """`[b, t] int64`."""
    mask: torch.Tensor
    """`[b, t - 1] bool`: response tokens."""
    old_logprobs: torch.Tensor
    """`[b, t - 1] float32`."""
    advantages: torch.Tensor
    """`[b, t - 1] float32`."""
    positions: torch.Tensor | None = None
    """`[1, t] int64`: place of each token in its own sample."""

    @property
    def targets(self) -> torch.Tensor:
        """`[b, t - 1] int64`."""
        return self.token_ids[:, 1:]


def rollout_micro_batches(batch: TrainBatch, rows: npt.NDArray[np.int64], size: int) -> Iterator[MicroBatch]:
    """Samples `rows` of a shard in micro-batches, the longest together so that little is padding."""
    lengths = np.diff(batch.offsets)
    by_length = rows[np.argsort(-lengths[rows], kind="stable")]
    for start in range(0, len(by_length), size):
        yield _from_rollout(batch, by_length[start : start + size], lengths)


def packed_micro_batches(batch: TrainBatch, update: int, updates: int) -> Iterator[MicroBatch]:
    """The micro-batches that the executor packed for one of a step's updates; as many on every rank."""
    rows = len(batch) // updates
    bounds = [bound for bound in batch.micro_batches.tolist() if update * rows <= bound <= (update + 1) * rows]
    for start, stop in itertools.pairwise(bounds):
        yield _packed(batch, start, stop)


def _packed(batch: TrainBatch, start: int, stop: int) -> MicroBatch:
    offsets = batch.offsets[start : stop + 1]
    span, lengths = slice(int(offsets[0]), int(offsets[-1])), np.diff(offsets)
    own = np.repeat(offsets[:-1] - offsets[0], lengths)
    positions = np.arange(len(own), dtype=np.int64) - own
    # The first token of a sample follows from nothing, least of all from the sample before it.
    mask = batch.response_mask[span].astype(bool) & (positions > 0)
    return MicroBatch(
        token_ids=torch.from_numpy(batch.token_ids[span].astype(np.int64))[None],
        mask=torch.from_numpy(mask)[None, 1:],
        old_logprobs=torch.from_numpy(batch.logprobs[span].astype(np.float32))[None, 1:],
        advantages=torch.from_numpy(np.repeat(batch.advantages[start:stop], lengths))[None, 1:],
        positions=torch.from_numpy(positions)[None],
    )


def _from_rollout(batch: TrainBatch, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> MicroBatch:
    longest = max(int(lengths[rows].max()), 2)
    shape = (len(rows), longest)
    token_ids, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    old_logprobs, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for place, row in enumerate(rows):
        span = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        count = int(lengths[row])
        token_ids[place, :count] = batch.token_ids[span]
        mask[place, :count] = batch.response_mask[span].astype(bool)
        old_logprobs[place, :count] = batch.logprobs[span]
        advantages[place] = batch.advantages[row]
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        mask=torch.from_numpy(mask[:, 1:]),
        old_logprobs=torch.from_numpy(old_logprobs[:, 1:]),
        advantages=torch.from_numpy(advantages[:, 1:]),
    )


def example_batch(examples: Sequence[Example]) -> MicroBatch:
    """Supervised examples, masked to their answers."""
    longest = max(len(example.token_ids) for example in examples)
    token_ids = np.zeros((len(examples), longest), np.int64)
    mask = np.zeros((len(examples), longest), bool)
    for place, example in enumerate(examples):
        token_ids[place, : len(example.token_ids)] = example.token_ids
        mask[place, example.answer_start : len(example.token_ids)] = True
    nothing = torch.zeros((len(examples), longest - 1))
    return MicroBatch(torch.from_numpy(token_ids), torch.from_numpy(mask[:, 1:]), nothing, nothing)
