"""The shape of summary.json: what the driver reports, completed by what the hub counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class Seconds(TypedDict):
    """Counted from the hub's start; None for what has not happened."""

    ready: float | None
    first_step: float | None
    total: float


def merged_summary(
    driver: Mapping[str, Any],
    *,
    outcome: str,
    reason: str,
    exit_code: int,
    attempt: int,
    step: int,
    weight_version: int,
    started: int,
    healed: int,
    ready: float | None,
    first_step: float | None,
    total: float,
) -> dict[str, Any]:
    """The summary of an attempt.

    Args:
        driver: the driver's part so far (steps, reward, heldout, groups, and whatever else it adds); may be empty.
        step: last step that the driver reported, used where its part says nothing.
        started: cells that were started at least once.
        healed: starts beyond a cell's first.
        ready: seconds from the hub's start until all cells were ready; None when that never was.
        first_step: seconds from the hub's start until the first reported step.
        total: seconds from the hub's start until the verdict.
    """
    summary: dict[str, Any] = {
        "outcome": outcome,
        "reason": reason,
        "exit_code": exit_code,
        "attempt": attempt,
        "steps": step,
        "weight_version": weight_version,
        "reward": {"first": None, "last": None, "best": None},
        "heldout": {"first": None, "last": None},
        "groups": {"dispatched": 0, "committed": 0, "returned": 0, "dropped": {}},
        "cells": {"started": started, "healed": healed},
        "seconds": {"ready": ready, "first_step": first_step, "total": total},
    }
    fixed = ("outcome", "reason", "exit_code", "attempt", "cells")
    for key, value in driver.items():
        if key in fixed:
            continue
        known = summary.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            # What the hub measured stands; the driver may add to it (its own times, more group counts).
            summary[key] = {**known, **value, **({k: v for k, v in known.items() if v} if key == "seconds" else {})}
        else:
            summary[key] = value
    # At the verdict nothing runs any more: what was in flight will be handed out again by the next attempt.
    groups = summary["groups"]
    groups["returned"] += groups.pop("in_flight", 0)
    return summary
