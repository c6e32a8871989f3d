"""Finished groups to what trainers consume: advantages, and one shard for each rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_hpc.config.schema import TrainConfig
from miles_hpc.rollout.groups import Gathered
from miles_hpc.rollout.split import RankShare, UnevenSplit, split_samples
from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.transport.columns import Array, Buffer, SchemaError, flat_index, offsets_of
from miles_hpc.transport.parcel import Packing, read_parcel

__all__ = ["Generations", "TrainBatch", "TrainData", "UnevenSplit", "advantages_of"]

KIND = "train_batch"
_TOKEN_COLUMNS = ("token_ids", "response_mask", "logprobs")
_SAMPLE_COLUMNS = ("advantages", "rewards", "group_index", "sample_index", "prompt_index", "status", "oldest_version")
_META = ("rollout_id", "weight_version", "dp_rank", "dp_size", "total_samples", "total_response_tokens", "padding")
_EPSILON = 1e-6
_GATHER_BELOW = 512
"""Tokens of a sample on average; shorter ones are gathered by index, longer ones taken as slices."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """One rank's shard of a rollout: `n` samples with `t` tokens. Arrays are read-only views, valid until the shard is
    acknowledged: their memory is used again."""

    rollout_id: int
    weight_version: int
    """Version that was current when the rollout was asked for."""
    dp_rank: int = 0
    dp_size: int = 1
    total_samples: int
    """Samples of all ranks, without padding."""
    total_response_tokens: int
    """Tokens with mask 1 of all ranks, for a loss that is a mean over tokens."""
    padding: int = 0
    """So many of the last samples (before micro-batches were packed) are repeats, with mask and advantage 0."""
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
    """`[n] float32`, as the reward function gave them."""
    group_index: Array
    """`[n] int64`: place of the sample's group in the rollout's sorted groups."""
    sample_index: Array
    """`[n] int64`: which generation of its group; samples of one generation share it."""
    prompt_index: Array
    """`[n] int64`: row of the data set."""
    status: Array
    """`[n] uint8`: index into `transport.batch.STATUSES`."""
    oldest_version: Array
    """`[n] int64`: lowest weight version that generated one of its tokens; -1 where none is known."""
    micro_batches: Array
    """`[k + 1] int64`: samples of micro-batch i; see `split.RankShare`."""
    extra: Mapping[str, Array] = field(default_factory=dict)
    """Name -> `[t, ...]`: further per-token arrays."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.offsets) - 1

    @classmethod
    def from_parcel(cls, memory: Buffer) -> TrainBatch:
        """A batch whose arrays are read-only views of the parcel.

        Raises:
            SchemaError: the memory holds something else.
        """
        columns, meta = read_parcel(KIND, memory)
        names = ("offsets", "micro_batches", *_TOKEN_COLUMNS, *_SAMPLE_COLUMNS)
        missing = [name for name in names if name not in columns] + [name for name in _META if name not in meta]
        if missing:
            raise SchemaError(f"a {KIND} lacks {missing}")
        fields: dict[str, Any] = {name: columns[name] for name in names} | {name: int(meta[name]) for name in _META}
        extra = {name[len("extra.") :]: column for name, column in columns.items() if name.startswith("extra.")}
        return cls(**fields, extra=extra)


class TrainData:
    """A rollout's groups, and the shards that are made of them. Tokens are copied once, into the shard's parcel.

    Args:
        groups: in the order of their ids.

    Raises:
        ValueError: there are no groups, or samples of one generation have different rewards.
        SchemaError: groups differ in their columns.
    """

    def __init__(self, groups: Gathered, *, rollout_id: int, weight_version: int, train: TrainConfig) -> None:
        if not len(groups):
            raise ValueError(f"rollout {rollout_id} has no groups")
        batches = groups.batches
        _same_columns(groups)
        self._batches = batches
        self._rollout_id = rollout_id
        self._weight_version = weight_version
        self._train = train
        self.lengths: Array = np.concatenate([batch.lengths for batch in batches])
        """`[n] int64`: tokens of each sample."""
        self.rewards: Array = np.concatenate([batch.rewards for batch in batches])
        """`[n] float32`."""
        self.total_response_tokens = sum(int(batch.loss_mask.sum(dtype=np.int64)) for batch in batches)
        self._starts = offsets_of([len(batch) for batch in batches])
        self.generations = Generations(groups)
        self._samples: dict[str, Array] = {
            "advantages": advantages_of(self.generations, train.advantage, normalize=train.normalize_advantages),
            "rewards": self.rewards,
            "group_index": np.repeat(np.arange(len(groups), dtype=np.int64), groups.flat_sizes),
            "sample_index": np.concatenate([batch.sample_index for batch in batches]),
            "prompt_index": np.concatenate([batch.prompt_index for batch in batches]),
            "status": np.concatenate([batch.status for batch in batches]),
            "oldest_version": _oldest_versions(batches, len(self.lengths)),
        }

    def __len__(self) -> int:
        """Samples."""
        return len(self.lengths)

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one entry, which lives as long as the rollout
    def shares(self, size: int) -> tuple[list[RankShare], str]:
        """What each of `size` ranks gets; see `split_samples`."""
        return split_samples(self.lengths, size, self._train)

    def shard(self, rank: int, size: int) -> Packing:
        """The parcel of a rank's TrainBatch.

        Raises:
            UnevenSplit: see `split_samples`, or there is no such rank.
        """
        if not 0 <= rank < size:
            raise UnevenSplit(f"dp_rank {rank} is outside 0..{size - 1}")
        share = self.shares(size)[0][rank]
        padded = np.zeros(len(share.rows), bool)
        # Repeats are always of the last sample; its first occurrence, if this rank has it, is the real one.
        if share.padding:
            padded[np.flatnonzero(share.rows == len(self) - 1)[-share.padding :]] = True
        columns: dict[str, Array | Sequence[Array]] = {
            "offsets": offsets_of(self.lengths[share.rows]),
            "micro_batches": share.micro_batches,
            **{name: column[share.rows] for name, column in self._samples.items()},
        }
        columns["advantages"] = np.where(padded, np.float32(0), self._samples["advantages"][share.rows])
        parts = _Parts(self._batches, self._starts, share.rows)
        columns["token_ids"] = parts.of([batch.token_ids for batch in self._batches])
        columns["logprobs"] = parts.of([batch.logprobs for batch in self._batches])
        mask = parts.of([batch.loss_mask for batch in self._batches])
        if share.padding:
            counts = np.concatenate(mask)
            counts[np.repeat(padded, self.lengths[share.rows])] = 0
            mask = [counts]
        columns["response_mask"] = mask
        for name in self._batches[0].extra:
            columns[f"extra.{name}"] = parts.of([batch.extra[name] for batch in self._batches])
        meta = {
            "rollout_id": self._rollout_id,
            "weight_version": self._weight_version,
            "dp_rank": rank,
            "dp_size": size,
            "total_samples": len(self),
            "total_response_tokens": self.total_response_tokens,
            "padding": share.padding,
        }
        return Packing(KIND, columns, meta)


class _Parts:
    """Where the tokens of some samples lie, for any column of tokens."""

    def __init__(self, batches: Sequence[RolloutBatch], starts: Array, rows: Array) -> None:
        self._places: list[tuple[int, slice | Array]] = []
        owner = np.searchsorted(starts, rows, side="right") - 1
        cuts = np.flatnonzero(np.diff(owner)) + 1
        for index, run in zip(owner[[0, *cuts]].tolist() if len(rows) else [], np.split(rows, cuts), strict=False):
            batch, own = batches[index], run - starts[index]
            if len(batch.token_ids) < _GATHER_BELOW * len(batch):
                self._places.append((index, flat_index(batch.offsets, own)))
                continue
            bounds = zip(batch.offsets[own].tolist(), batch.offsets[own + 1].tolist(), strict=True)
            self._places += [(index, slice(start, stop)) for start, stop in bounds]

    def of(self, columns: Sequence[Array]) -> list[Array]:
        """The parts of a column that is given for each batch; at least one."""
        return [columns[index][place] for index, place in self._places] or [columns[0][:0]]


def _same_columns(groups: Gathered) -> None:
    first = groups.batches[0].extra
    number = 0
    for batch, sizes in zip(groups.batches, groups.sizes, strict=True):
        extra = batch.extra
        if set(extra) != set(first) or any(extra[name].dtype != first[name].dtype for name in first):
            found = {name: str(column.dtype) for name, column in extra.items()}
            raise SchemaError(f"group {number} of the rollout has extra columns {found}; group 0 has {sorted(first)}")
        number += len(sizes)


class Generations:
    """The generations of a rollout: samples of one generation share group, `sample_index` and reward.

    Raises:
        ValueError: samples of one generation have different rewards; the text names them.
    """

    def __init__(self, groups: Gathered) -> None:
        owner = np.repeat(np.arange(len(groups), dtype=np.int64), groups.flat_sizes)
        index = np.concatenate([batch.sample_index for batch in groups.batches])
        found = np.concatenate([batch.rewards for batch in groups.batches])
        order = np.lexsort((index, owner))
        fresh = np.ones(len(order), bool)
        fresh[1:] = (np.diff(owner[order]) != 0) | (np.diff(index[order]) != 0)
        first = order[fresh]
        self.of_sample: Array = np.empty(len(order), np.int64)
        """`[n] int64`: generation of each sample."""
        self.of_sample[order] = np.cumsum(fresh) - 1
        self.group: Array = owner[first]
        """`[g] int64`: group of each generation, rising."""
        self.rewards: Array = found.astype(np.float64)[first]
        """`[g] float64`."""
        self.sizes: Array = np.bincount(self.group, minlength=len(groups))
        """`[groups] int64`: generations of each group."""
        differs = np.flatnonzero(self.rewards[self.of_sample] != found)
        if len(differs):
            sample = int(differs[0])
            raise ValueError(
                f"samples of generation {int(index[sample])} of group {int(owner[sample])} have rewards "
                f"{self.rewards[self.of_sample[sample]]:g} and {found[sample]:g}; they are one answer and must agree"
            )

    def sums(self, values: Array) -> Array:
        """Sum of a value of each generation over each group, `[groups] float64`."""
        totals: Array = np.bincount(self.group, weights=values, minlength=len(self.sizes))
        return totals

    @property
    def means(self) -> Array:
        """Mean reward of each group, `[groups] float64`."""
        means: Array = self.sums(self.rewards) / self.sizes
        return means

    @property
    def deviations(self) -> Array:
        """Standard deviation of the rewards of each group, `[groups] float64`; exactly 0 where they are equal."""
        # Around a reward of the group, not around the rounded mean, so that equal rewards differ by nothing.
        centred = self.rewards - self.rewards[np.searchsorted(self.group, self.group)]
        mean = self.sums(centred) / self.sizes
        deviations: Array = np.sqrt(self.sums((centred - mean[self.group]) ** 2) / self.sizes)
        return deviations


def _oldest_versions(batches: Sequence[RolloutBatch], samples: int) -> Array:
    unknown = np.iinfo(np.int64).max
    oldest = np.full(samples, unknown, np.int64)
    spans = np.concatenate([np.diff(batch.span_offsets) for batch in batches])
    np.minimum.at(
        oldest, np.repeat(np.arange(samples), spans), np.concatenate([batch.spans[:, 0] for batch in batches])
    )
    return np.where(oldest == unknown, -1, oldest)


def advantages_of(generations: Generations, estimator: str, *, normalize: bool) -> Array:
    """Advantage of every sample, `[n] float32`.

    - `grpo`, `gspo`: reward minus the mean of the group, divided by its standard deviation + 1e-6 where `normalize`
      (https://arxiv.org/abs/2402.03300, eq. 3); a group of equal rewards stays at 0.
    - `rloo`: reward minus the mean of the *other* generations of the group (https://arxiv.org/abs/2402.14740).
    - `reinforce++_baseline`: reward minus the group's mean, then whitened over the whole rollout
      (https://arxiv.org/abs/2501.03262); `reinforce++`: whitened over the rollout, without the baseline.
    - `none`: the reward itself.
    """
    values = generations.rewards
    if estimator not in ("none", "reinforce++"):
        values = values - generations.means[generations.group]
        values[generations.deviations[generations.group] == 0] = 0.0
        sizes = generations.sizes[generations.group]
        if estimator == "rloo":
            values = values * sizes / np.maximum(1, sizes - 1)
        elif estimator in ("grpo", "gspo") and normalize:
            values = values / (generations.deviations[generations.group] + _EPSILON)
    whole = values[generations.of_sample]
    if estimator.startswith("reinforce++"):
        whole = (whole - whole.mean()) / (whole.std() + _EPSILON)
    rounded: Array = whole.astype(np.float32)
    return rounded
