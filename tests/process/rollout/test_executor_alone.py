"""The executor alone is killed, at each stage of a rollout: nothing that a worker holds is generated again, the ranks
get what they would have got, and nothing is lost or used twice."""

import asyncio

import numpy as np
import pytest

from miles_hpc.rollout.client import BatchReader

pytestmark = pytest.mark.process

SETTINGS = {
    "rollout": {"generate": "modes:counted", "concurrency": 4, "batch_size": 6},
    "reward": {"function": "modes:by_index"},
    "data": {"shuffle": False},
}


async def begin(run, drive, workers=2):
    executor = run.start("executor")
    for index in range(workers):
        run.start("worker", index)
    driver = drive(run)
    await driver.open()
    return driver, executor


def begun(run):
    return (run.run_dir / "begun").read_text().split()


def pull(run, driver, rollout, rank):
    reader = BatchReader(run.book(), driver.opened.incarnation)
    try:
        shard = reader.get(rollout, rank, 2, timeout_s=40)
        tokens = np.array(shard.token_ids)
        reader.ack(rollout, rank)
        return tokens
    finally:
        reader.close()


def go(scenario):
    asyncio.run(asyncio.wait_for(scenario, 100))


@pytest.fixture
def quiet(small_run, drive, read_ledger):
    """Ledger and tokens of a run that nobody hurts."""
    run = small_run("quiet", config=SETTINGS)
    tokens = []

    async def scenario():
        driver, _ = await begin(run, drive)
        for rollout in range(1, 5):
            await driver.client.generate(rollout, 1)
            tokens.append([await asyncio.to_thread(pull, run, driver, rollout, rank) for rank in range(2)])
            await driver.commit(rollout)
        await driver.client.close()

    go(scenario())
    return read_ledger(run.run_dir), tokens


def replace(run, executor, n):
    run.kill(executor)
    return run.start("executor", n=n)


def test_between_two_ranks_pulls_and_before_the_commit(small_run, drive, read_ledger, quiet):
    run = small_run(config=SETTINGS)

    async def scenario():
        driver, executor = await begin(run, drive)
        for rollout in range(1, 5):
            result = await driver.client.generate(rollout, 1)
            first = await asyncio.to_thread(pull, run, driver, rollout, 0)
            if rollout == 2:
                executor = replace(run, executor, 2)
            second = await asyncio.to_thread(pull, run, driver, rollout, 1)
            for found, expected in zip((first, second), quiet[1][rollout - 1], strict=True):
                np.testing.assert_array_equal(found, expected)
            if rollout == 3:
                executor = replace(run, executor, 3)
            assert len(result.groups) == 6
            await driver.commit(rollout)
        counts = await driver.client.counts(final=True)
        assert counts == {"dispatched": 24, "committed": 24, "returned": 0, "dropped": {}}
        await driver.client.close()

    go(scenario())
    assert read_ledger(run.run_dir) == quiet[0]
    # No sample was generated a second time.
    assert len(begun(run)) == len(set(begun(run))) == 24 * 4


def test_while_a_rollout_is_generated(small_run, drive, read_ledger, quiet):
    run = small_run(config=SETTINGS)

    async def scenario():
        driver, executor = await begin(run, drive)
        await driver.step(1)
        await driver.commit(1)
        (run.run_dir / "hold").touch()
        under_way = asyncio.ensure_future(driver.client.generate(2, 1))
        await run.until(lambda: len(begun(run)) >= 6 * 4 + 6 * 4, "six groups to run")
        replace(run, executor, 2)
        await asyncio.sleep(0)
        (run.run_dir / "hold").unlink()
        result = await under_way
        assert len(result.groups) == 6
        await asyncio.to_thread(driver.pull, 2)
        await driver.commit(2)
        for rollout in (3, 4):
            await driver.step(rollout)
            await driver.commit(rollout)
        counts = await driver.client.counts(final=True)
        assert counts["committed"] == 24 and counts["dispatched"] == 24 + counts["returned"]
        await driver.client.close()

    go(scenario())
    assert read_ledger(run.run_dir) == quiet[0]
    assert len(begun(run)) == len(set(begun(run))) == 24 * 4


def test_with_a_worker_at_the_same_time_only_what_nobody_holds_is_done_again(small_run, drive, read_ledger, quiet):
    run = small_run(config=SETTINGS)

    async def scenario():
        driver, executor = await begin(run, drive, workers=0)
        worker = run.start("worker", 0)
        await driver.client.generate(1, 1)
        run.kill(worker)
        run.withdraw("rollout-worker", 0)
        replace(run, executor, 2)
        run.start("worker", 1)
        await asyncio.to_thread(driver.pull, 1)
        await driver.commit(1)
        for rollout in range(2, 5):
            await driver.step(rollout)
            await driver.commit(rollout)
        counts = await driver.client.counts(final=True)
        assert counts == {"dispatched": 30, "committed": 24, "returned": 0, "dropped": {"regenerate": 6}}
        await driver.client.close()

    go(scenario())
    assert read_ledger(run.run_dir) == quiet[0]
