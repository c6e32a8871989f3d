"""Waiting for the address book: deadlines with progress lines, and a bell for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.sockets import HubError
from miles_hpc.wire.time_limit import within

log = logging.getLogger(__name__)

Pools: TypeAlias = "dict[str, list[CellAddrs]]"
"""Pool id -> living cells in cell order."""

_PROGRESS_EVERY_S = 10.0


class WaitTimeout(HubError):
    """What was waited for did not appear in the address book in time."""


class Wait:
    """The deadline and the progress lines of one wait."""

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._next_report = self._started + _PROGRESS_EVERY_S

    def pause(self, pools: Pools, ended: str) -> float:
        """Seconds until the wait must look again.

        Raises:
            WaitTimeout: when its time is over.
            HubError: when the client has ended.
        """
        if ended:
            raise HubError(f"while waiting for {self._what}: {ended}")
        now = time.monotonic()
        waited = now - self._started
        if waited >= self._timeout_s:
            known = ", ".join(f"{pool} x {len(cells)}" for pool, cells in sorted(pools.items())) or "no pool"
            raise WaitTimeout(f"{self._what} did not come within {self._timeout_s:g} s; the address book has {known}")
        if now >= self._next_report:
            self._next_report = now + _PROGRESS_EVERY_S
            log.info("waiting for %s, %.0f of %g s", self._what, waited, self._timeout_s)
        return min(self._next_report - now, self._timeout_s - waited)


class Doorbell:
    """Wakes a coroutine when the address book changes or the client ends."""

    def __init__(self, on_change: Callable[[Callable[[Pools], None]], Callable[[], None]]) -> None:
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def __enter__(self) -> Doorbell:
        self._remove = self._on_change(self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _ring(self, pools: Pools) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self, timeout_s: float) -> None:
        """Until the next change since the last wait, at most `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timeout_s, self._rung.wait())
        self._rung.clear()
