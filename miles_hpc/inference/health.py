"""Is an engine alive behind its HTTP server? Signs of progress that cost it nothing, and never a generation.

The agent sees processes end and `/health` fail. A scheduler that stands still behind a living HTTP process shows in
neither: `/health` (without its generation) and the metrics go on answering from memory. What was seen on 0.5.23:
`/v1/loads` has a time stamp that moves when the scheduler is idle or busy, and stands still when it is paused or
stopped; `/server_info` asks the scheduler, so it answers when paused, and hangs when stopped.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from miles_hpc.inference.engine_api import EngineApi, EngineError
from miles_hpc.wire.time_limit import within

STRIKES = 3


@dataclass(frozen=True)
class Look:
    """One look at an engine: the time stamp of its loads (None: no answer), and what else was found.

    `trouble` is empty when its scheduler gave a sign of life.
    """

    stamp: float | None
    trouble: str = ""


@dataclass
class Progress:
    """What the looks at one engine in one epoch add up to. Pure."""

    epoch: int
    stamp: float | None = None
    strikes: int = 0

    def on_look(self, look: Look) -> str:
        """Take a look; the reason why the engine is given up, or an empty text."""
        if look.stamp is not None:
            self.stamp = look.stamp
        self.strikes = self.strikes + 1 if look.trouble else 0
        if self.strikes < STRIKES:
            return ""
        return f"no sign of life of its scheduler in {self.strikes} looks: {look.trouble}"


def interval_s(stall_s: float) -> float:
    """Seconds between two looks, so that a verdict falls within `stall_s`: each look may take `patience_s` as well."""
    return stall_s / (3 * STRIKES)


def patience_s(stall_s: float) -> float:
    """Seconds that one call of a look may take."""
    return stall_s / (2 * STRIKES)


async def look(api: EngineApi, before: float | None, timeout_s: float) -> Look:
    """Look once. `before`: the stamp of the last look; a stamp that moved is a sign of life."""
    try:
        stamp = await within(timeout_s, api.loads_stamp(timeout_s=timeout_s))
    except (EngineError, asyncio.TimeoutError) as error:
        return Look(None, f"/v1/loads: {error or 'no answer'}")
    if before is None or stamp > before:
        return Look(stamp)
    try:
        await api.server_info(timeout_s=timeout_s)
    except EngineError as error:
        return Look(stamp, f"/v1/loads stands still, and /server_info: {error}")
    return Look(stamp)
