"""Which rank learns from which sample, and in which micro-batch. Decided once, from lengths alone, for all ranks."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from miles_hpc.config.schema import TrainConfig
from miles_hpc.transport.columns import Array, offsets_of


class UnevenSplit(ValueError):
    """The samples of a rollout do not divide by the number of ranks."""


@dataclass(frozen=True, eq=False)
class RankShare:
    """One rank's samples in the order in which it gets them."""

    rows: Array
    """`[m] int64` into the rollout's samples."""
    padding: int
    """So many of the last rows are repeats that carry no loss."""
    micro_batches: Array
    """`[k + 1] int64`: micro-batch i is rows `micro_batches[i]` to `micro_batches[i + 1]`; k is equal on all ranks.
    Those of the first of `updates_per_step` updates come first; every update has equally many rows."""


def split_samples(lengths: Array, size: int, train: TrainConfig) -> tuple[list[RankShare], str]:
    """The shares of `size` ranks, and one line on what was left out or repeated (empty: nothing).

    Every rank gets equally many samples. `balanced` deals the longest first, always to the rank with the fewest tokens
    that still has room. Micro-batches are filled first-fit, longest first, under `max_tokens_per_micro_batch`; a longer
    sample is alone in one. Ranks with fewer micro-batches than others have their largest split.

    Args:
        lengths: tokens of each sample, `[n] int64`.

    Raises:
        UnevenSplit: the samples do not divide and `train.uneven` says `error`, or trimming leaves none.
    """
    if size < 1:
        raise UnevenSplit(f"{size} ranks; expected at least one")
    rows, padding, note = _even(len(lengths), size * train.updates_per_step, train)
    dealt = _deal(lengths[rows], size, train.split)
    shares = []
    first_repeat = len(rows) - padding
    for part in dealt:
        # Repeats go last, so that a rank can tell them by their number.
        part = part[np.argsort(part >= first_repeat, kind="stable")]
        shares.append((rows[part], int((part >= first_repeat).sum())))
    if not train.max_tokens_per_micro_batch:
        whole = [RankShare(own, repeats, np.array([0, len(own)], np.int64)) for own, repeats in shares]
        return whole, note
    packed: list[list[list[int]]] = [[] for _ in shares]
    for update in range(train.updates_per_step):
        here = [
            _first_fit(lengths[own], np.arange(update, len(own), train.updates_per_step), train) for own, _ in shares
        ]
        most = max(len(bins) for bins in here)
        for bins, all_bins in zip(here, packed, strict=True):
            _split_largest(bins, most)
            all_bins += bins
    result = []
    for (own, repeats), bins in zip(shares, packed, strict=True):
        order = np.array([row for one in bins for row in one], np.int64)
        result.append(RankShare(own[order], repeats, offsets_of([len(one) for one in bins])))
    return result, note


def _even(count: int, unit: int, train: TrainConfig) -> tuple[Array, int, str]:
    rows = np.arange(count, dtype=np.int64)
    rest = count % unit
    if not rest:
        return rows, 0, ""
    what = f"{count} samples do not divide by {unit} (train.ranks x train.updates_per_step)"
    if train.uneven == "trim" and count > rest:
        return rows[: count - rest], 0, f"{what}: the last {rest} are left out"
    if train.uneven == "pad":
        padding = unit - rest
        return (
            np.concatenate([rows, np.full(padding, count - 1, np.int64)]),
            padding,
            (f"{what}: the last one is repeated {padding} times without loss"),
        )
    remedy = (
        "it is too few to trim" if train.uneven == "trim" else "set rollout.batch_size to a multiple, or train.uneven"
    )
    raise UnevenSplit(f"{what}: {remedy}")


def _deal(lengths: Array, size: int, how: str) -> list[Array]:
    if how == "strided":
        return [np.arange(rank, len(lengths), size, dtype=np.int64) for rank in range(size)]
    room = len(lengths) // size
    heap = [(0, rank) for rank in range(size)]
    parts: list[list[int]] = [[] for _ in range(size)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, rank = heapq.heappop(heap)
        parts[rank].append(row)
        if len(parts[rank]) < room:
            heapq.heappush(heap, (tokens + int(lengths[row]), rank))
    return [np.array(sorted(part), np.int64) for part in parts]


def _first_fit(lengths: Array, rows: Array, train: TrainConfig) -> list[list[int]]:
    budget = train.max_tokens_per_micro_batch
    bins: list[list[int]] = []
    rooms = _Rooms(len(rows), budget)
    for row in rows[np.argsort(-lengths[rows], kind="stable")].tolist():
        need = int(lengths[row])
        place = rooms.first(min(need, budget))
        if place == len(bins):
            bins.append([])
        bins[place].append(row)
        rooms.take(place, need)
    return bins


class _Rooms:
    """Tokens that `count` micro-batches have room for; the first with enough is found in log(count) steps."""

    def __init__(self, count: int, budget: int) -> None:
        self._leaves = 1 << max(0, count - 1).bit_length()
        self._most = [budget] * (2 * self._leaves)
        """A binary tree: entry i is the most of entries 2 i and 2 i + 1, the micro-batches are its last entries."""

    def first(self, need: int) -> int:
        entry = 1
        while entry < self._leaves:
            entry = 2 * entry if self._most[2 * entry] >= need else 2 * entry + 1
        return entry - self._leaves

    def take(self, place: int, tokens: int) -> None:
        entry = place + self._leaves
        self._most[entry] -= tokens
        while entry > 1:
            entry //= 2
            self._most[entry] = max(self._most[2 * entry], self._most[2 * entry + 1])


def _split_largest(bins: list[list[int]], count: int) -> None:
    while len(bins) < count:
        largest = max(bins, key=len)
        if len(largest) < 2:
            raise UnevenSplit(f"{count} micro-batches on one rank cannot be matched by {len(bins)} samples on another")
        half = len(largest) // 2
        bins.append(largest[half:])
        del largest[half:]
