"""When an agent may claim the next epoch: evidence that the hub's node is gone, and not only a link. Pure.

All times are on the caller's monotonic clock.
"""

from __future__ import annotations

import msgspec

from miles_hpc.agent.lease import Lease

CLAIM_AFTER_S = 10.0
"""From suspicion to the claim of the first candidate."""
STEP_S = 3.0
"""Each further candidate waits this much longer."""
CANDIDATES = 5
STANDS_STILL_S = 10.0
"""Two reads of the lease that are this far apart and equal show that nobody renews it."""


class _Read(msgspec.Struct, frozen=True):
    at: float
    lease: Lease


class Claim:
    """From the moment that the hub is suspect until it is heard again or the claim is made.

    Args:
        rank: place of this agent among the candidates; None: it may not claim.
        now: when the suspicion began.
    """

    def __init__(self, rank: int | None, now: float) -> None:
        self.rank = rank
        self.began = now
        self._first: _Read | None = None
        self._last: _Read | None = None
        self.why_not = "the suspicion is young"

    def _again(self, now: float, why: str) -> None:
        self.began, self.why_not = now, why

    def on_lease(self, now: float, lease: Lease) -> None:
        """A read of the lease, the file opened anew for it, has returned."""
        if self._first is None or self._first.lease != lease:
            if self._first is not None:
                self._again(now, "the lease was renewed")
            self._first = _Read(now, lease)
        self._last = _Read(now, lease)

    def on_hub_agent(self, now: float) -> None:
        """The agent beside the hub has answered: it starts its hub anew by itself."""
        self._again(now, "the agent beside the hub answers")

    def on_yes(self, now: float, node: str) -> None:
        """Another agent hears the hub: then only our own link is broken."""
        self._again(now, f"{node} hears the hub")

    def on_pause(self, seconds: float) -> None:
        """This agent itself stood still: nobody is judged by that time, nor by a read from before it."""
        self.began += seconds
        self._first = self._last = None

    def ripe(self, now: float) -> bool:
        """Whether this agent must claim now."""
        if self.rank is None or self.rank >= CANDIDATES:
            self.why_not = "this agent is no candidate"
            return False
        if now - self.began < CLAIM_AFTER_S + STEP_S * self.rank:
            return False
        if self._first is None or self._last is None or self._last.at - self._first.at < STANDS_STILL_S:
            self.why_not = "the lease was not seen to stand still"
            return False
        return True


def rank_of(node: str, hub_node: str, roster: list[str]) -> int | None:
    """Place of a node among the candidates for the hub's succession: all others in node order."""
    others = [name for name in sorted(roster) if name != hub_node]
    return others.index(node) if node in others else None
