"""Rewards that are cheaper together: samples of all groups gather for a short while, and are scored by one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles_hpc.rollout.sample import Sample


class RewardBatches:
    """Gathers samples for a function that takes many at once.

    A call that fails says nothing about which of its samples is to blame: each is then scored by a call of its own, so
    that only the guilty one fails.

    Args:
        call: the function; returns one value for each sample, in their order.
        size: a call is made as soon as so many samples wait.
        wait_s: and this long after the first of them at the latest.
    """

    def __init__(self, call: Callable[[list[Sample]], Awaitable[Sequence[Any]]], *, size: int, wait_s: float) -> None:
        self._call = call
        self._size = size
        self._wait_s = wait_s
        self._waiting: list[tuple[Sample, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> Any:
        """What the function returned for this sample; raises what its call raised."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((sample, answer))
        if len(self._waiting) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._send)
        return await answer

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._run(waiting))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run(self, waiting: Sequence[tuple[Sample, asyncio.Future[Any]]]) -> None:
        wanted = [(sample, answer) for sample, answer in waiting if not answer.done()]
        if not wanted:
            return
        try:
            values = await self._call([sample for sample, _ in wanted])
        except asyncio.CancelledError:  # by `close`, or from inside the function
            for _, answer in wanted:
                answer.cancel()
            raise
        except Exception as error:
            if len(wanted) > 1:
                await asyncio.gather(*(self._run([one]) for one in wanted))
            elif not wanted[0][1].done():
                wanted[0][1].set_exception(error)
            return
        for (_, answer), value in zip(wanted, values, strict=True):
            if not answer.done():
                answer.set_result(value)

    async def close(self) -> None:
        """End the calls that run; whoever waits for one is cancelled with it."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
