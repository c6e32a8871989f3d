"""Finished groups to what trainers consume: advantages, and one shard per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.transport.columns import (
    Array,
    Buffer,
    SchemaError,
    decode_columns,
    encode_columns,
    flat_index,
    offsets_of,
)

KIND = "train_batch"
_TOKEN_COLUMNS = ("token_ids", "response_mask", "logprobs")
_SAMPLE_COLUMNS = ("advantages", "rewards", "group_index", "sample_index", "status")
_EPSILON = 1e-6


class UnevenSplit(ValueError):
    """The samples of a rollout do not divide by the number of ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """A rollout, or one rank's shard of it: `n` samples with `t` tokens. Arrays are read-only views."""

    rollout_id: int
    weight_version: int
    """Version that was current when the rollout was dispatched."""
    dp_rank: int = 0
    dp_size: int = 1
    total_samples: int
    """Samples of all ranks."""
    total_response_tokens: int
    """Tokens with mask 1 of all ranks, for a loss that is a mean over tokens."""
    token_ids: Array
    """`[t] int32`: prompt and response of each sample."""
    offsets: Array
    """`[n + 1] int64` into the token columns."""
    response_mask: Array
    """`[t] uint8`: 1 where the loss counts."""
    logprobs: Array
    """`[t] float32`: log-probability of `token_ids[i]` when it was generated; 0 where the mask is 0."""
    advantages: Array
    """`[n] float32`."""
    rewards: Array
    """`[n] float32`."""
    group_index: Array
    """`[n] int64`: place of the sample's group in the rollout's sorted groups."""
    sample_index: Array
    """`[n] int64`: which sample of its group."""
    status: Array
    """`[n] uint8`: index into `transport.batch.STATUSES`."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.offsets) - 1

    def split(self, rank: int, size: int) -> TrainBatch:
        """Samples rank, rank + size, …: equally many for every rank, without a loop over samples.

        Raises:
            UnevenSplit: they do not divide.
        """
        if not 0 <= rank < size:
            raise UnevenSplit(f"dp_rank {rank} is outside 0..{size - 1}")
        if len(self) % size:
            raise UnevenSplit(
                f"{len(self)} samples (rollout.batch_size x rollout.samples_per_prompt) do not divide by {size} ranks "
                f"(train.ranks): set rollout.batch_size to a multiple"
            )
        rows = np.arange(rank, len(self), size, dtype=np.int64)
        tokens = flat_index(self.offsets, rows)
        return replace(
            self,
            dp_rank=rank,
            dp_size=size,
            offsets=offsets_of(np.diff(self.offsets)[rows]),
            **{name: getattr(self, name)[tokens] for name in _TOKEN_COLUMNS},
            **{name: getattr(self, name)[rows] for name in _SAMPLE_COLUMNS},
        )

    def to_frames(self) -> list[Buffer]:
        """Header frame and one frame per column, which views the array."""
        names = ("offsets", *_TOKEN_COLUMNS, *_SAMPLE_COLUMNS)
        meta = {name: getattr(self, name) for name in _META}
        return encode_columns(KIND, {name: getattr(self, name) for name in names}, meta)

    @classmethod
    def from_frames(cls, frames: Sequence[Buffer]) -> TrainBatch:
        """A batch whose arrays are read-only views of the frames.

        Raises:
            SchemaError: the frames hold something else.
        """
        columns, meta = decode_columns(KIND, frames)
        names = ("offsets", *_TOKEN_COLUMNS, *_SAMPLE_COLUMNS)
        missing = [name for name in names if name not in columns] + [name for name in _META if name not in meta]
        if missing:
            raise SchemaError(f"a {KIND} lacks {missing}")
        fields: dict[str, Any] = {name: columns[name] for name in names} | {name: int(meta[name]) for name in _META}
        return cls(**fields)


_META = ("rollout_id", "weight_version", "dp_rank", "dp_size", "total_samples", "total_response_tokens")


def group_advantages(rewards: Array, *, normalize: bool) -> Array:
    """GRPO: a sample's reward minus the mean of its group, `[n] float32`.

    Args:
        rewards: of one group, `[n] float32`.
        normalize: divide by the group's standard deviation + 1e-6 (https://arxiv.org/abs/2402.03300, eq. 3); a group of
            equal rewards stays at 0.
    """
    exact = rewards.astype(np.float64)
    advantages = exact - exact.mean()
    if normalize:
        advantages /= exact.std() + _EPSILON
    rounded: Array = advantages.astype(np.float32)
    return rounded


def to_train_batch(
    groups: Sequence[RolloutBatch], *, rollout_id: int, weight_version: int, normalize: bool
) -> TrainBatch:
    """Groups, in the order of their ids, as one unsplit train batch.

    Raises:
        ValueError: there are no groups.
    """
    if not groups:
        raise ValueError(f"rollout {rollout_id} has no groups")
    whole = RolloutBatch.concat(groups)
    return TrainBatch(
        rollout_id=rollout_id,
        weight_version=weight_version,
        total_samples=len(whole),
        total_response_tokens=int(whole.loss_mask.sum(dtype=np.int64)),
        token_ids=whole.token_ids,
        offsets=whole.offsets,
        response_mask=whole.loss_mask,
        logprobs=np.where(whole.loss_mask, whole.logprobs, np.float32(0)),
        advantages=np.concatenate([group_advantages(group.rewards, normalize=normalize) for group in groups]),
        rewards=whole.rewards,
        group_index=np.repeat(np.arange(len(groups), dtype=np.int64), [len(group) for group in groups]),
        sample_index=whole.sample_index,
        status=whole.status,
    )


def rollout_metrics(groups: Sequence[RolloutBatch]) -> dict[str, float]:
    """What a step's log says of its rollout; lengths count tokens with mask 1."""
    whole = RolloutBatch.concat(groups)
    marks = np.concatenate([np.zeros(1, np.int64), np.cumsum(whole.loss_mask, dtype=np.int64)])
    lengths = marks[whole.offsets[1:]] - marks[whole.offsets[:-1]]
    equal = sum(bool(np.ptp(group.rewards) == 0) for group in groups)
    return {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated": float((whole.status == 1).mean()),
        "groups_with_equal_rewards": equal / len(groups),
        "groups_solved_once": sum(bool(group.rewards.max() > 0) for group in groups) / len(groups),
    }
