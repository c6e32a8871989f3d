"""The fillers of a long answer of fake_engine, all at once; apart, since numpy is larger than the rest of it."""

from __future__ import annotations

from typing import Any

import numpy as np


def fillers(key: int, head: int, begin: int, end: int, kinds: int) -> tuple[list[int], list[float]]:
    """Kinds and log-probs of output tokens `begin` to `end - 1`, as `Script.filler` and `Script.logprob` give them.

    Args:
        head: length of the answer's scripted beginning.
        kinds: how many fillers there are to choose from.
    """
    places = np.arange(begin, end, dtype=np.uint64)
    which = _mix64(np.uint64(key) + places - np.uint64(head) + np.uint64(1)) % np.uint64(kinds)
    logprobs = -0.05 - 2.0 * (_mix64(np.uint64(key) ^ _mix64(places)) / 2.0**64)
    return which.tolist(), logprobs.tolist()


def _mix64(values: Any) -> Any:
    """`mix64` of an array of uint64."""
    with np.errstate(over="ignore"):  # it is meant to wrap around
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
