"""Time limits of coroutines: `timeout` around a block, `within` around a call.

Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that comes together with the result, and whoever
cancelled waits for a coroutine that goes on for ever.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout", "within"]

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What `work` returns, in a task of its own that has ended when this ends.

    Not for acquiring what must be given back: the caller's cancellation wins over a result that comes with it.

    Raises:
        asyncio.TimeoutError: after `seconds`; `work` is cancelled then.
    """
    task = asyncio.ensure_future(work)
    late = False
    try:
        # The time limit cancels nobody who waits here: a cancellation that arrives is the caller's, and goes on as one.
        await asyncio.wait({task}, timeout=seconds)
        if late := task.cancel():
            await asyncio.wait({task})
    except asyncio.CancelledError:
        await _end(task)
        raise
    try:
        return task.result()
    except asyncio.CancelledError:
        if late:
            raise asyncio.TimeoutError from None
        raise


async def _end(task: asyncio.Future[T]) -> None:
    while task.cancel():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue  # once more; the first one is on its way already
    if not task.cancelled():
        task.exception()  # nobody else will look at it
