import asyncio
import sys
import time

import pytest

from miles_hpc.wire.time_limit import settled, within

pytestmark = pytest.mark.unit


async def cancelled_with_the_result(waits):
    """How a coroutine ends that waits for two events, and is cancelled in the moment in which the first comes."""
    first, second = asyncio.Event(), asyncio.Event()
    second.set()

    async def caller():
        await waits(60, first.wait())
        await waits(60, second.wait())

    task = asyncio.ensure_future(caller())
    for _ in range(3):
        await asyncio.sleep(0)  # until it waits
    # The inner task is woken before the outer one, so it has ended when that one is told of its cancellation.
    first.set()
    task.cancel()
    await asyncio.wait({task})
    return "cancelled" if task.cancelled() else "went on"


def test_a_cancellation_that_comes_with_the_result_is_not_swallowed():
    assert asyncio.run(cancelled_with_the_result(within)) == "cancelled"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio.wait_for is as good there")
def test_asyncio_s_own_swallows_it():
    async def wait_for(seconds, work):
        return await asyncio.wait_for(work, seconds)

    assert asyncio.run(cancelled_with_the_result(wait_for)) == "went on"


@pytest.mark.parametrize("cancelled", ["before", "after", "before and after"])
def test_a_cancellation_that_comes_with_the_end_of_the_time_is_not_swallowed(cancelled):
    async def main():
        loop, never = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.ensure_future(within(0.01, never.wait()))
        # All timers are due in one turn of the loop.
        if "before" in cancelled:
            loop.call_later(0.01, task.cancel)
        await asyncio.sleep(0)
        if "after" in cancelled:
            loop.call_later(0.01, task.cancel)
        loop.call_soon(time.sleep, 0.05)
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(main())


def test_what_is_late_is_cancelled_and_has_ended_before_the_error():
    ends = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ends.append("ended")

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, slow())
        assert ends == ["ended"]

    asyncio.run(main())


def test_a_result_that_is_there_when_the_time_ends_counts():
    async def stubborn():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "done after all"

    assert asyncio.run(within(0.01, stubborn())) == "done after all"


def test_whoever_is_cancelled_ends_after_its_work():
    order = []

    async def main():
        going, leave = asyncio.Event(), asyncio.Event()

        async def work():
            try:
                going.set()
                await asyncio.sleep(60)
            finally:
                await leave.wait()
                order.append("work")

        async def caller():
            try:
                await within(60, work())
            finally:
                order.append("caller")

        task = asyncio.ensure_future(caller())
        await going.wait()
        task.cancel()
        await asyncio.sleep(0)
        leave.set()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(main())
    assert order == ["work", "caller"]


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
def test_what_the_work_raises_is_raised(error):
    async def fails():
        raise error

    with pytest.raises(type(error)):
        asyncio.run(within(5, fails()))


@pytest.mark.parametrize("first", ["work", "caller"])
def test_a_caller_cancelled_together_with_its_work_knows_it(first):
    """So a cancellation that reaches it is never taken for one of the work alone."""

    async def main():
        work = asyncio.ensure_future(asyncio.Event().wait())
        caller = asyncio.ensure_future(settled(work))
        await asyncio.sleep(0)
        for task in (work, caller) if first == "work" else (caller, work):
            task.cancel()
        await asyncio.wait({caller})
        assert work.cancelled()
        return caller.cancelled()

    assert asyncio.run(main())


def test_work_that_is_cancelled_alone_is_settled():
    async def main():
        work = asyncio.ensure_future(asyncio.Event().wait())
        caller = asyncio.ensure_future(settled(work))
        await asyncio.sleep(0)
        work.cancel()
        await caller
        return work.cancelled()

    assert asyncio.run(main())
