"""What is counted of samples beside their tokens: in the worker, group by group; told as a step's metrics."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

from miles_hpc.rollout.finished import InvalidSample
from miles_hpc.rollout.groups import Group
from miles_hpc.rollout.sample import Sample

_TAIL_BYTES = 10_000
_SHORTEST = 500
_RATIO = 10.0


def repetitive(text: str) -> bool:
    """Whether the end of a text says one thing again and again: its last 10,000 bytes shrink to less than a tenth.

    Ordinary prose shrinks to about a third of its size.
    """
    if len(text) < _SHORTEST:
        return False
    tail = text[-_TAIL_BYTES:].encode("utf-8", "replace")[-_TAIL_BYTES:]
    return len(tail) > _RATIO * len(zlib.compress(tail, 1))


def group_stats(samples: Sequence[Sample]) -> dict[str, float]:
    """The counts of a finished group, added up over its samples; what is not there is 0.

    Raises:
        InvalidSample: a count is no number.
    """
    found: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.stats.items():
            if not isinstance(value, int | float):
                where = f"sample {sample.index} of group {sample.group}"
                raise InvalidSample(f"{where} has stats[{name!r}] = {value!r:.60}; expected a number")
            found[name] = float(found.get(name, 0.0) + value)  # a number of numpy cannot be sent
        for name, counts in (("repetitive", repetitive(sample.response)), (f"category/{sample.category}", 1)):
            if counts and not name.endswith("/"):
                found[name] = found.get(name, 0.0) + 1
    return found


def stats_to_keep(stats: Mapping[str, float]) -> dict[str, float]:
    """Of the counts of a group those that are not found again in its texts and rewards, and can be written down."""
    return {
        name: value
        for name, value in stats.items()
        if name != "repetitive" and not name.startswith("category/") and math.isfinite(value)
    }


def stat_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rates and means over the samples of these groups. What the engines do not count is left out.

    - `repetitive`: share of samples, see there; `category/<word>`: share, of what the reward function named.
    - `prefix_cache_hit_rate`, `cached_tokens_mean`: prompt tokens that an engine had already.
    - `spec_accept_rate`, `spec_accept_length`: drafts that were right; tokens for each verification.
    - `tito_mismatch`, `tito_mismatch/<kind>`: share of sessions, see `session.mismatch`.
    - `tool_seconds_mean`: not generating; others: means of what generate functions put into `sample.stats`.
    """
    samples = sum(len(group) for group in groups)
    total: dict[str, float] = {}
    for group in groups:
        for name, value in group.stats.items():
            total[name] = total.get(name, 0.0) + value

    def share(name: str, of: str) -> float | None:
        count = total.get(of, 0.0)
        return total.get(name, 0.0) / count if count else None

    found: dict[str, float | None] = {
        "repetitive": total.pop("repetitive", 0.0) / samples,
        "prefix_cache_hit_rate": share("cached_tokens", "prompt_tokens"),
        "cached_tokens_mean": total["cached_tokens"] / samples if "cached_tokens" in total else None,
        "spec_accept_rate": share("spec_num_correct_drafts", "spec_num_proposed_drafts"),
        "spec_accept_length": share("completion_tokens", "spec_verify_ct"),
        "tito_mismatch": share("tito_mismatched", "tito_sessions"),
        "tool_seconds_mean": total["tool_s"] / samples if "tool_s" in total else None,
    }
    for name, value in total.items():
        if name.startswith("tito_mismatch/"):
            found[name] = value / total["tito_sessions"]
        elif name not in _TOLD:
            found[name] = value / samples
    return {name: value for name, value in found.items() if value is not None}


_TOLD = frozenset(
    {
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "spec_num_correct_drafts",
        "spec_num_proposed_drafts",
        "spec_verify_ct",
        "tito_sessions",
        "tito_mismatched",
        "tool_s",
    }
)


def add_up(sample: Sample, counts: Mapping[str, float]) -> None:
    """Add counts to those of a sample."""
    for name, value in counts.items():
        sample.stats[name] = sample.stats.get(name, 0.0) + value
