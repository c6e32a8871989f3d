"""How a program of ours that serves from an event loop comes to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from miles_hpc.wire.program import stop_signals
from miles_hpc.wire.progress import ProgressCounter

_COUNT_EVERY_S = 1.0


def stop_event() -> asyncio.Event:
    """Set by the signals that end this program in order. Call in the running loop of the main thread.

    From then on the turns of the loop are counted for the agent.
    """
    stop = asyncio.Event()
    _count_turns(ProgressCounter.from_environ())
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _count_turns(counter: ProgressCounter) -> None:
    counter.bump()
    asyncio.get_running_loop().call_later(_COUNT_EVERY_S, _count_turns, counter)


async def until_one_ends(*parts: Awaitable[object]) -> None:
    """Run parts together until the first ends; the others are cancelled then, and waited for.

    Raises:
        Exception: what the first raised.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
