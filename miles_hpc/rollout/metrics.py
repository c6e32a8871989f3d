"""What a step's log says of its rollout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from miles_hpc.rollout.convert import group_rewards
from miles_hpc.transport.batch import STATUSES, RolloutBatch
from miles_hpc.transport.columns import Array


def rollout_metrics(groups: Sequence[RolloutBatch]) -> dict[str, float]:
    """Means over samples or groups; lengths count tokens with mask 1."""
    lengths = np.concatenate([_mask_sums(group) for group in groups])
    status = np.concatenate([group.status for group in groups])
    rewards = [group_rewards(group)[0] for group in groups]
    spans = np.concatenate([group.spans for group in groups])
    found = {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_median": float(np.median(lengths)),
        "response_tokens_min": float(lengths.min()),
        "response_tokens_max": float(lengths.max()),
        "truncated": float((status == STATUSES.index("truncated")).mean()),
        "reward_std": float(np.mean([one.std() for one in rewards])),
        "groups_with_equal_rewards": _share(bool(np.ptp(one) == 0) for one in rewards),
        "groups_solved_once": _share(bool(one.max() > 0) for one in rewards),
        **pass_at_k(rewards),
    }
    for value in sorted({float(one[0]) for one in rewards if np.ptp(one) == 0})[:4]:
        found[f"groups_all_{value:g}"] = _share(bool(np.ptp(one) == 0 and one[0] == value) for one in rewards)
    if len(spans):
        found |= {
            "weight_version_min": float(spans[:, 0].min()),
            "weight_version_max": float(spans[:, 0].max()),
            "mixed_versions": float(np.mean(np.concatenate([_mixed(group) for group in groups]))),
        }
    return found


def pass_at_k(rewards: Sequence[Array]) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4 … up to the size of a group, over groups that have this size.

    A generation passes with a reward above 0. Unbiased estimator 1 - C(n - c, k) / C(n, k) of
    https://arxiv.org/abs/2107.03374.
    """
    size = max((len(one) for one in rewards), default=0)
    whole = [(len(one), int((one > 0).sum())) for one in rewards if len(one) == size]
    found: dict[str, float] = {}
    k = 1
    while k <= size:
        chances = [1.0 - math.comb(n - right, k) / math.comb(n, k) for n, right in whole]
        found[f"pass@{k}"] = float(np.mean(chances))
        k *= 2
    return found


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)


def _mask_sums(group: RolloutBatch) -> Array:
    marks = np.concatenate([np.zeros(1, np.int64), np.cumsum(group.loss_mask, dtype=np.int64)])
    sums: Array = marks[group.offsets[1:]] - marks[group.offsets[:-1]]
    return sums


def _mixed(group: RolloutBatch) -> Array:
    low = np.full(len(group), np.iinfo(np.int64).max, np.int64)
    high = np.full(len(group), -1, np.int64)
    owner = np.repeat(np.arange(len(group)), np.diff(group.span_offsets))
    np.minimum.at(low, owner, group.spans[:, 0])
    np.maximum.at(high, owner, group.spans[:, 0])
    mixed: Array = high > low
    return mixed
