"""What a step's log says of its rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from miles_hpc.rollout.convert import Generations
from miles_hpc.transport.batch import STATUSES, RolloutBatch
from miles_hpc.transport.columns import Array


def rollout_metrics(batches: Sequence[RolloutBatch], generations: Generations) -> dict[str, float]:
    """Means over samples or groups; lengths count tokens with mask 1."""
    lengths = np.concatenate([_mask_sums(batch) for batch in batches])
    status = np.concatenate([batch.status for batch in batches])
    equal = generations.deviations == 0
    count = len(generations.sizes)
    highest = np.maximum.reduceat(generations.rewards, np.searchsorted(generations.group, np.arange(count)))
    found = {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_median": float(np.median(lengths)),
        "response_tokens_min": float(lengths.min()),
        "response_tokens_max": float(lengths.max()),
        "truncated": float((status == STATUSES.index("truncated")).mean()),
        "reward_std": float(generations.deviations.mean()),
        "groups_with_equal_rewards": float(equal.mean()),
        "groups_solved_once": float((highest > 0).mean()),
        **pass_at_k(generations),
    }
    for value in np.unique(highest[equal])[:4].tolist():
        found[f"groups_all_{value:g}"] = float((highest[equal] == value).sum() / count)
    versions = np.concatenate([batch.spans[:, 0] for batch in batches])
    if len(versions):
        owner = np.repeat(np.arange(len(lengths)), np.concatenate([np.diff(batch.span_offsets) for batch in batches]))
        low, high = np.full(len(lengths), np.iinfo(np.int64).max), np.full(len(lengths), -1)
        np.minimum.at(low, owner, versions)
        np.maximum.at(high, owner, versions)
        found |= {
            "weight_version_min": float(versions.min()),
            "weight_version_max": float(versions.max()),
            "mixed_versions": float((high > low).mean()),
        }
    return found


def pass_at_k(generations: Generations) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4 … up to the size of a group, over the groups that have the full size.

    A generation passes with a reward above 0. Unbiased estimator 1 - C(n - c, k) / C(n, k) of
    https://arxiv.org/abs/2107.03374.
    """
    size = int(generations.sizes.max())
    passed = generations.sums((generations.rewards > 0).astype(np.float64)).astype(np.int64)
    counts, groups = np.unique(passed[generations.sizes == size], return_counts=True)
    found: dict[str, float] = {}
    k = 1
    while k <= size:
        chances = [1.0 - math.comb(size - right, k) / math.comb(size, k) for right in counts.tolist()]
        found[f"pass@{k}"] = float(np.dot(chances, groups) / groups.sum())
        k *= 2
    return found


def _mask_sums(group: RolloutBatch) -> Array:
    marks = np.zeros(len(group.loss_mask) + 1, np.int64)
    np.cumsum(group.loss_mask, out=marks[1:])
    sums: Array = np.diff(marks[group.offsets])
    return sums
