"""Finished groups: many small ones share a batch, so that what each costs is counted in microseconds."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.transport.columns import Array, SchemaError, offsets_of

_MERGE_BELOW = 4096
"""Tokens of a group; smaller ones are copied into one batch, larger ones stay where they are."""


class Group:
    """Rows `start` to `stop` of a batch: the samples of one group."""

    __slots__ = ("categories", "oldest", "start", "stats", "stop", "whole")

    def __init__(self, whole: RolloutBatch, start: int, stop: int, oldest: int) -> None:
        self.whole = whole
        self.start = start
        self.stop = stop
        self.oldest = oldest
        """Lowest weight version of its tokens; -1 where none is known."""
        self.stats: Mapping[str, float] = {}
        """What was counted of its samples; see `statistics`."""
        self.categories: Sequence[str] = ()
        """Words that the rewards of its samples were sorted under, one for each; empty: there are none."""

    def __len__(self) -> int:
        """Samples."""
        return self.stop - self.start

    @property
    def batch(self) -> RolloutBatch:
        """The group alone, as views."""
        return self.whole if len(self) == len(self.whole) else self.whole.slice(self.start, self.stop)


def groups_of(batch: RolloutBatch, sizes: Sequence[int] | Array) -> list[Group]:
    """The groups of a batch in which they lie one behind the other.

    Raises:
        SchemaError: the sizes do not add up to the batch.
    """
    bounds = offsets_of(sizes)
    if bounds[-1] != len(batch) or (len(sizes) and min(sizes) < 1):
        raise SchemaError(f"groups of {list(sizes)[:8]} samples do not make up a batch of {len(batch)}")
    places = bounds.tolist()
    oldest = _lowest(batch.spans[:, 0], batch.span_offsets[bounds])
    return [Group(batch, *place) for place in zip(places, places[1:], oldest, strict=False)]


def _lowest(versions: Array, bounds: Array) -> list[int]:
    """The lowest version between each two bounds, -1 where there is none."""
    lowest = np.full(len(bounds) - 1, -1, np.int64)
    filled = np.flatnonzero(np.diff(bounds))
    if len(filled):
        lowest[filled] = np.minimum.reduceat(versions, bounds[filled])
    found: list[int] = lowest.tolist()
    return found


def faults(batch: RolloutBatch, groups: Sequence[Group], samples: Sequence[int]) -> dict[int, str]:
    """What keeps groups of a batch from being trained on, by their place in `groups`.

    Args:
        samples: how many generations each was ordered with.
    """
    found: dict[int, str] = {}
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.lexsort((batch.sample_index, owner))
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(owner[order]) != 0) | (np.diff(batch.sample_index[order]) != 0)
    generations = np.bincount(owner[order[fresh]], minlength=len(groups))
    for place in np.flatnonzero(generations != np.asarray(samples)).tolist():
        found[place] = f"has {generations[place]} samples; expected {samples[place]}"
    for name, column, rows in (("reward", batch.rewards, None), ("log-prob", batch.logprobs, batch.offsets)):
        finite = np.isfinite(column)
        if finite.all():
            continue
        for bad in np.flatnonzero(~finite).tolist():
            row = bad if rows is None else int(np.searchsorted(rows, bad, side="right")) - 1
            place = int(owner[row])
            found.setdefault(place, f"sample {row - groups[place].start} has a {name} that is not finite")
    return found


@dataclass(frozen=True)
class Gathered:
    """The groups of a rollout in the order of their ids."""

    batches: list[RolloutBatch]
    """Their samples, one batch behind the other."""
    sizes: list[list[int]]
    """Samples of each group, for each batch."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Gathered:
        """Small groups that follow each other become one batch, larger ones are left where they are.

        Raises:
            SchemaError: small groups differ in their columns.
        """
        batches: list[RolloutBatch] = []
        sizes: list[list[int]] = []
        small: list[Group] = []
        for group in groups:
            whole = group.whole
            if len(whole.token_ids) * len(group) < _MERGE_BELOW * len(whole):
                small.append(group)
                continue
            _merge(small, batches, sizes)
            batches.append(group.batch)
            sizes.append([len(group)])
        _merge(small, batches, sizes)
        return cls(batches, sizes)

    @classmethod
    def alone(cls, batches: Sequence[RolloutBatch]) -> Gathered:
        """Each batch is one group."""
        return cls(list(batches), [[len(batch)] for batch in batches])

    def __len__(self) -> int:
        """Groups."""
        return sum(map(len, self.sizes))

    @property
    def flat_sizes(self) -> list[int]:
        """Samples of each group."""
        return [size for sizes in self.sizes for size in sizes]

    def digests(self) -> list[str]:
        """SHA-256 over lengths, tokens, mask and rewards of each group; log-probs and versions may differ between
        attempts."""
        return [
            digest
            for batch, sizes in zip(self.batches, self.sizes, strict=True)
            for digest in _digests(batch, np.array(sizes, np.int64))
        ]

    def versions(self) -> list[list[int]]:
        """Weight versions that each group's tokens came from, rising."""
        return [
            versions
            for batch, sizes in zip(self.batches, self.sizes, strict=True)
            for versions in _versions(batch, offsets_of(sizes))
        ]


def _merge(small: list[Group], batches: list[RolloutBatch], sizes: list[list[int]]) -> None:
    """Move groups into one batch at the end of `batches`."""
    if not small:
        return
    wholes = {id(group.whole): group.whole for group in small}
    starts = dict(zip(wholes, offsets_of([len(whole) for whole in wholes.values()]).tolist(), strict=False))
    counts = np.array([len(group) for group in small], np.int64)
    first = np.array([starts[id(group.whole)] + group.start for group in small], np.int64)
    rows = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    batches.append(RolloutBatch.concat(list(wholes.values())).take(rows))
    sizes.append(counts.tolist())
    small.clear()


def _digests(batch: RolloutBatch, sizes: Array) -> list[str]:
    ends = np.cumsum(sizes)
    starts = ends - sizes
    # Each group's own offsets begin at 0, and are one more than its samples.
    owner = np.repeat(np.arange(len(sizes)), sizes + 1)
    own = batch.offsets[np.arange(len(owner)) - owner] - batch.offsets[starts][owner]
    tokens, mask, rewards = (
        np.ascontiguousarray(column).data for column in (batch.token_ids, batch.loss_mask, batch.rewards)
    )
    offsets = own.data
    found = []
    at = 0
    bounds = np.stack([starts, ends, batch.offsets[starts], batch.offsets[ends]], axis=1)
    for start, end, first, last in bounds.tolist():
        digest = hashlib.sha256(offsets[at : at + end - start + 1])
        digest.update(tokens[first:last])
        digest.update(mask[first:last])
        digest.update(rewards[start:end])
        found.append(digest.hexdigest())
        at += end - start + 1
    return found


def _versions(batch: RolloutBatch, bounds: Array) -> list[list[int]]:
    versions: list[int] = batch.spans[:, 0].tolist()
    places: list[int] = batch.span_offsets[bounds].tolist()
    return [sorted(set(versions[start:end])) for start, end in itertools.pairwise(places)]
