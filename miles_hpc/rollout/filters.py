"""Which finished groups may be trained on: functions of a group's samples, the built-in ones or the user's own."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from miles_hpc.rollout.functions import load_function
from miles_hpc.rollout.sample import Sample

KEY = "rollout.filters"
_EQUAL = 1e-8
_NO_NAME = re.compile(r"[^a-z0-9_.+-]+")


def nonzero_std(samples: Sequence[Sample]) -> bool | tuple[bool, str]:
    """Refuses a group whose rewards are all equal: it teaches nothing. The reason names the reward."""
    rewards = [float(sample.reward or 0.0) for sample in samples]
    return max(rewards) - min(rewards) > _EQUAL, f"zero_std_{rewards[0]:.4g}"


def no_truncated(samples: Sequence[Sample]) -> bool:
    """Refuses a group with an answer that was cut off at its token limit."""
    return all(sample.status != "truncated" for sample in samples)


def no_aborted(samples: Sequence[Sample]) -> bool:
    """Refuses a group with an answer that its generate function gave up."""
    return all(sample.status != "aborted" for sample in samples)


BUILT_IN: dict[str, Callable[[Sequence[Sample]], Any]] = {
    "nonzero_std": nonzero_std,
    "no_truncated": no_truncated,
    "no_aborted": no_aborted,
}


class FilterError(Exception):
    """A filter raised; the text holds its traceback."""


class Filter:
    """One filter.

    Args:
        path: of `rollout.filters`: a built-in name, or a dotted path of `f(samples) -> keep` or `-> (keep, reason)`.

    Raises:
        FunctionPathError: it cannot be imported.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._function = BUILT_IN.get(path) or load_function(path, KEY)

    def refuses(self, samples: Sequence[Sample]) -> str:
        """Why the group may not be trained on, as a word to count by; empty when it may.

        Raises:
            FilterError: the function raised, or returned something else than `keep` or `(keep, reason)`.
        """
        try:
            answer = self._function(samples)
            keep, reason = answer if isinstance(answer, tuple) else (answer, self._path.rpartition(":")[2])
        except Exception as error:
            raise FilterError(f"{KEY}: {self._path!r}: {traceback.format_exc()}") from error
        if keep:
            return ""
        # A refusal without a word would read as none.
        return _NO_NAME.sub("_", str(reason).lower())[:60] or "unnamed"
