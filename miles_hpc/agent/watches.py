"""All that watches over the workers of a node: their probes, progress counters and essential processes."""

from __future__ import annotations

import select
from collections.abc import Callable

from miles_hpc.agent.essentials import Essentials
from miles_hpc.agent.probes import Finding, Probes
from miles_hpc.agent.stalls import Stalls


class Watches:
    """Nobody waits for anything here: the agent polls `filenos` and calls `advance`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stalls = Stalls(clock)
        self.probes = Probes(clock, self.stalls.moved)
        self.essentials = Essentials(clock)

    def remove(self, worker: str) -> None:
        """Watch a worker no more."""
        self.probes.remove(worker)
        self.stalls.remove(worker)
        self.essentials.remove(worker)

    def on_pause(self, seconds: float) -> None:
        """This agent itself stood still, and perhaps everything else with it: that time counts for nobody."""
        self.probes.on_pause(seconds)
        self.stalls.on_pause(seconds)

    def filenos(self) -> dict[int, int]:
        """Descriptors to poll, with `select.POLLIN` or `POLLOUT`."""
        return {**self.probes.filenos(), **dict.fromkeys(self.essentials.filenos(), select.POLLIN)}

    def next_deadline(self) -> float:
        """When `advance` has something to do even if no descriptor is ready."""
        return min(one.next_deadline() for one in (self.probes, self.stalls, self.essentials))

    def advance(self, ready: set[int]) -> list[Finding]:
        """Go on with everything that is due or ready."""
        return [*self.probes.advance(ready), *self.stalls.advance(), *self.essentials.advance(ready)]
