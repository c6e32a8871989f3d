"""What one call to the executor waits for, and when it must give up."""

from __future__ import annotations

import asyncio
from collections import Counter

from miles_hpc.rollout.accounts import is_filtered
from miles_hpc.rollout.groups import Group
from miles_hpc.rollout.sample import PartialSample

REWARD_REASONS = frozenset({"reward_failed", "reward_timeout"})


class StaleIncarnation(RuntimeError):
    """The caller belongs to another training incarnation than the one that was opened last."""


class NotOpened(StaleIncarnation):
    """This executor has begun no incarnation yet: it is new, and the driver must say what there is."""


class RolloutFailed(RuntimeError):
    """Too many groups of a rollout were dropped; the text holds the reasons and the last failure."""


class RewardsFailing(RolloutFailed):
    """More reward calls failed than `reward.max_failure_rate` allows."""


class Collector:
    """The groups of one rollout or evaluation, as they come in. Without I/O, except that `wait` waits.

    Args:
        what: names the call in texts.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.open: set[str] = set()
        """Groups that are neither finished nor dropped."""
        self.results: dict[str, Group] = {}
        self.partial: dict[str, list[PartialSample]] = {}
        self.dropped: Counter[str] = Counter()
        self.reward_calls = 0
        self.reward_failures = 0
        self.last_failure = ""
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def expect(self, groups: list[str]) -> None:
        """These groups were handed to the board."""
        self.open.update(groups)

    def on_result(self, name: str, group: Group, reward_calls: int) -> None:
        """A group is complete."""
        self.open.discard(name)
        self.results[name] = group
        self.reward_calls += reward_calls
        self._changed.set()

    def on_drop(self, group: str, reason: str, text: str, reward_calls: int) -> None:
        """A group was given up."""
        self.open.discard(group)
        self.dropped[reason] += 1
        self.reward_calls += reward_calls
        self.reward_failures += reason in REWARD_REASONS
        if not is_filtered(reason) or not self.last_failure:
            self.last_failure = text
        self._changed.set()

    def on_partial(self, group: str, samples: list[PartialSample]) -> None:
        """A group was interrupted."""
        self.open.discard(group)
        self.partial[group] = samples
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self._error = error
        self._changed.set()

    async def wait(self) -> None:
        """Wait for a change.

        Raises:
            Exception: what `fail` was given.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    def check(
        self, *, batch_size: int, samples: int, max_failure_rate: float, rows: int, max_filtered_batches: int = 10
    ) -> None:
        """Give up a rollout that goes nowhere, instead of dispatching for ever.

        Args:
            batch_size, samples: groups in a rollout, samples in a group.
            max_failure_rate: `reward.max_failure_rate`, of the calls that a rollout without failures makes.
            rows: size of the data set: when so many groups were filtered out, all were.
            max_filtered_batches: `rollout.max_filtered_batches`.

        Raises:
            RewardsFailing: too many reward calls failed.
            RolloutFailed: more than two batches were dropped for failures, or the whole data set or too many batches
                were filtered out.
        """
        calls = max(self.reward_calls, batch_size * samples)
        if self.reward_failures > max_failure_rate * calls:
            raise RewardsFailing(
                f"{self.what}: {self.reward_failures} of {calls} reward calls failed, "
                f"reward.max_failure_rate = {max_failure_rate:g}. The last one: {self.last_failure}"
            )
        filtered = sum(number for reason, number in self.dropped.items() if is_filtered(reason))
        failed = self.dropped.total() - filtered
        if failed > 2 * batch_size or filtered > min(rows, max_filtered_batches * batch_size):
            table = ", ".join(f"{reason} {number}" for reason, number in sorted(self.dropped.items()))
            raise RolloutFailed(
                f"{self.what}: {len(self.results)} of {batch_size} groups finished, {self.dropped.total()} dropped "
                f"({table}). The last failure: {self.last_failure}"
            )
