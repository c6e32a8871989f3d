"""What became of every dispatch. dispatched = committed + returned + dropped{reason} + in flight, always."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

REASONS = {
    "lost": "its worker died or fell silent; the prompt was dispatched again",
    "duplicate": "another worker finished it first",
    "superseded": "a newer training incarnation went back behind it",
    "regenerate": "nobody kept a copy of it when the executor was lost; the prompt was dispatched again",
    "stale": "mode async: its oldest token was more than max_staleness versions behind",
    "unpublished_version": "a token came from weights that the trainer never published",
    "generation_failed": "a sample could not be generated",
    "generation_timeout": "a sample was not generated in rollout.sample_timeout_s",
    "reward_failed": "a reward raised, or was no finite number",
    "reward_timeout": "a reward did not return in reward.timeout_s",
    "prompt_too_long": "the prompt is longer than data.max_prompt_tokens",
    "invalid_sample": "a sample cannot be trained on",
    "filter_failed": "a function of rollout.filters raised",
}
"""Why a dispatch was dropped; besides these `filtered_<reason>` of `rollout.filters`."""


def is_filtered(reason: str) -> bool:
    """Whether a reason says nothing against the run."""
    return reason == "prompt_too_long" or reason.startswith("filtered_")


class ConservationBroken(AssertionError):
    """The numbers do not add up: a bug here."""


class Accounts(msgspec.Struct, kw_only=True):
    """Counts of prompt groups over the whole run, one for each time that a group was sent to a worker."""

    dispatched: int = 0
    committed: int = 0
    returned: int = 0
    """Given back to the data order without having been used."""
    dropped: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        """Dispatches whose end is open: running, or finished and not yet committed."""
        return self.dispatched - self.committed - self.returned - sum(self.dropped.values())

    def drop(self, reason: str, count: int = 1) -> None:
        """End `count` dispatches; a negative count takes back what turned out to be wrong."""
        left = Counter(self.dropped)
        left[reason] += count
        self.dropped = {name: number for name, number in sorted(left.items()) if number}

    def check(self, in_flight: int) -> None:
        """Raises ConservationBroken unless exactly `in_flight` dispatches are open."""
        if self.in_flight != in_flight or min(self.committed, self.returned, *self.dropped.values(), 0) < 0:
            raise ConservationBroken(f"{self.to_dict()}, but {in_flight} dispatches are in flight")

    def to_dict(self, *, final: bool = False) -> dict[str, Any]:
        """As in summary.json; `final` reports what is in flight as returned."""
        counts: dict[str, Any] = {
            "dispatched": self.dispatched,
            "committed": self.committed,
            "returned": self.returned + (self.in_flight if final else 0),
            "dropped": dict(self.dropped),
        }
        return counts if final else {**counts, "in_flight": self.in_flight}

    def settled(self, committing: int) -> Accounts:
        """The accounts of a commit: `committing` open dispatches are committed, all other open ones are left out."""
        committed = self.committed + committing
        closed = committed + self.returned + sum(self.dropped.values())
        return Accounts(dispatched=closed, committed=committed, returned=self.returned, dropped=dict(self.dropped))
