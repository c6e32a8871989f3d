"""Waiting for coroutines: `within` a time limit, `settled` without one.

Both run the work in a task of its own, so that a cancellation that arrives here is the caller's, whatever else ends the
work in the same turn of the loop. Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that comes
together with the result, and whoever cancelled waits for a coroutine that goes on for ever. Not a time limit around a
block either: it cancels the caller's own task, and Python 3.10 does not count cancellations, so one that comes with the
end of the time is taken for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

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


async def settled(task: asyncio.Future[T]) -> None:
    """Wait until `task` has ended, however it ends. The caller's cancellation ends it first, and then goes on."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await _end(task)
        raise


async def _end(task: asyncio.Future[T]) -> None:
    while task.cancel():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue  # once more; the first one is on its way already
    if not task.cancelled():
        task.exception()  # nobody else will look at it
