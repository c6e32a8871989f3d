"""Does a worker's own loop move? Its progress counter says so; nobody waits for anything here, and nothing is asked."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from miles_hpc.agent.probes import Finding
from miles_hpc.wire.ids import Generation

_LOOKS = 4
"""Looks at a counter in the time that it may stand still."""


class _Counter(msgspec.Struct):
    generation: Generation
    read: Callable[[], int]
    limit: float
    count: int
    moved_at: float
    look_at: float
    asked: int
    """The count when `moved` was last asked."""


class Stalls:
    """The progress counters of a node's workers; each is judged from the time that its worker is ready."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counters: dict[str, _Counter] = {}

    def add(self, worker: str, generation: Generation, read: Callable[[], int], limit: float) -> None:
        """Judge a worker whose counter may stand still for `limit` seconds; 0: never."""
        if limit > 0:
            now = self._clock()
            count = read()
            self._counters[worker] = _Counter(generation, read, limit, count, now, now + limit / _LOOKS, count)

    def remove(self, worker: str) -> None:
        """Judge a worker no more."""
        self._counters.pop(worker, None)

    def moved(self, worker: str) -> bool:
        """Whether a worker's counter has moved since this was last asked; False for one that is not judged."""
        counter = self._counters.get(worker)
        if counter is None:
            return False
        before, counter.asked = counter.asked, counter.read()
        return counter.asked != before

    def next_deadline(self) -> float:
        """When `advance` has something to do."""
        return min((counter.look_at for counter in self._counters.values()), default=math.inf)

    def on_pause(self, seconds: float) -> None:
        """This agent itself stood still, and perhaps everything else with it: that time counts for nobody."""
        for counter in self._counters.values():
            counter.moved_at += seconds

    def advance(self) -> list[Finding]:
        """Look at the counters that are due; a finding is made once."""
        now = self._clock()
        findings = []
        for worker, counter in list(self._counters.items()):
            if now < counter.look_at:
                continue
            counter.look_at = now + counter.limit / _LOOKS
            count = counter.read()
            if count != counter.count:
                counter.count, counter.moved_at = count, now
            elif now - counter.moved_at >= counter.limit:
                del self._counters[worker]
                text = f"its progress counter stands at {count} since {now - counter.moved_at:.0f} s"
                findings.append(Finding(worker, counter.generation, "probe_failed", text))
        return findings
