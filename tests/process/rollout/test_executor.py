import asyncio
import signal

import numpy as np
import pytest

from miles_hpc.rollout.client import BatchReader
from miles_hpc.wire.rpc import RpcRemoteError

pytestmark = pytest.mark.process


def sums(counts):
    return counts["committed"] + counts["returned"] + sum(counts["dropped"].values()) + counts["in_flight"]


def run_async(coroutine, timeout_s=60):
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


async def undisturbed(run, drive, steps=6, workers=2):
    run.start("executor")
    for index in range(workers):
        run.start("worker", index)
    driver = drive(run)
    await driver.open()
    await driver.steps(0, steps)
    counts = await driver.client.counts()
    await driver.client.close()
    return counts


def test_a_run_commits_every_group_once_in_data_order(small_run, drive, read_ledger):
    run = small_run()
    counts = run_async(undisturbed(run, drive))
    lines = read_ledger(run.run_dir)
    assert counts == {"dispatched": 24, "committed": 24, "returned": 0, "dropped": {}, "in_flight": 0}
    assert [line["group"] for line in lines] == [f"e{i // 20:05d}-i{i % 20:09d}" for i in range(24)]
    assert [line["step"] for line in lines] == [i // 4 for i in range(24)]
    assert sorted(line["prompt_index"] for line in lines[:20]) == list(range(20))
    assert all(line["samples"] == 4 and line["weight_versions"] == [1] and line["attempt"] == 1 for line in lines)


def test_ranks_get_equal_shards_again_until_they_acknowledge(small_run, drive):
    async def scenario(run):
        run.start("executor")
        run.start("worker")
        driver = drive(run)
        assert await driver.open() == {"prompts": 20, "heldout": 20}
        result = await driver.client.generate(0, 1)
        assert await driver.client.generate(0, 1) == result
        first = await asyncio.to_thread(driver.pull, 0)
        assert [len(shard) for shard in first] == [8, 8]
        assert sum(int(shard.response_mask.sum()) for shard in first) == result.tokens == first[0].total_response_tokens
        rewards = np.concatenate([shard.rewards for shard in first])
        assert rewards.mean() == pytest.approx(result.reward_mean)
        for group in range(4):
            mine = [shard.advantages[shard.group_index == group] for shard in first]
            assert abs(np.concatenate(mine).sum()) < 1e-4
        reader = BatchReader(run.book(), 1)
        with pytest.raises(RpcRemoteError, match="its shard is freed"):
            await asyncio.to_thread(reader.get, 0, 0, 2, 5)
        with pytest.raises(RpcRemoteError, match="was not finished within 0"):
            await asyncio.to_thread(reader.get, 7, 0, 2, 0.2)
        await driver.client.generate(1, 1)
        again = [await asyncio.to_thread(reader.get, 1, 0, 2, 5) for _ in range(2)]
        np.testing.assert_array_equal(again[0].token_ids, again[1].token_ids)
        with pytest.raises(RpcRemoteError, match="do not divide by 3"):
            await driver.client.generate(2, 1)
            await asyncio.to_thread(reader.get, 2, 0, 3, 5)
        reader.close()
        await driver.client.close()

    run_async(scenario(small_run()))


def test_a_worker_killed_with_groups_in_flight_changes_no_ledger(small_run, drive, read_ledger):
    calm = small_run("calm")
    run_async(undisturbed(calm, drive))
    hurt = small_run("hurt")

    async def scenario(run):
        run.start("executor")
        first, second = run.start("worker", 0), run.start("worker", 1)
        driver = drive(run)
        await driver.open()
        await driver.steps(0, 2)
        hold = run.run_dir / "hold"
        hold.touch()
        step = asyncio.ensure_future(driver.step(2))
        in_flight = await run.until(lambda: len(run.running(first.pid)) == 8 and run.running(first.pid), "8 samples")
        assert len({name.split(".")[1] for name in in_flight}) == 2
        run.kill(first)
        run.withdraw("rollout-worker", 0)
        hold.unlink()
        replacement = run.start("worker", 0, n=2)
        await step
        await driver.commit(2)
        run.environment["SCRIPT_DELAY_S"] = "0"
        hold.touch()
        step = asyncio.ensure_future(driver.step(3))
        await run.until(lambda: run.running(replacement.pid), "the replacement to work")
        hold.unlink()
        await step
        await driver.commit(3)
        await driver.steps(4, 6)
        counts = await driver.client.counts()
        await driver.client.close()
        assert second.poll() is None
        return counts

    counts = run_async(scenario(hurt))
    assert counts["committed"] == 24 and counts["in_flight"] == 0 and sums(counts) == counts["dispatched"]
    assert counts["dropped"] == {"lost": 2} and counts["dispatched"] == 26
    assert read_ledger(hurt.run_dir) == read_ledger(calm.run_dir)


def test_a_worker_stopped_for_longer_than_its_lease_delays_but_changes_nothing(small_run, drive, read_ledger):
    calm = small_run("calm")
    run_async(undisturbed(calm, drive, steps=3))
    timing = {"heartbeat": 0.3, "suspect": 1.0, "dead": 2.0}
    hurt = small_run("hurt", config={"timing": timing})

    async def scenario(run):
        run.start("executor")
        stopped, _ = run.start("worker", 0), run.start("worker", 1)
        driver = drive(run)
        await driver.open()
        hold = run.run_dir / "hold"
        hold.touch()
        step = asyncio.ensure_future(driver.step(0))
        await run.until(lambda: len(run.running(stopped.pid)) == 8, "groups in flight")
        stopped.send_signal(signal.SIGSTOP)
        hold.unlink()
        await step
        await driver.commit(0)
        stopped.send_signal(signal.SIGCONT)
        await driver.steps(1, 3)
        hold.touch()
        step = asyncio.ensure_future(driver.step(3))
        await run.until(lambda: run.running(stopped.pid), "the stopped worker to work again")
        hold.unlink()
        await step
        counts = await driver.client.counts()
        await driver.client.close()
        return counts

    counts = run_async(scenario(hurt))
    assert counts["committed"] == 12 and counts["in_flight"] == 4 and sums(counts) == counts["dispatched"]
    assert read_ledger(hurt.run_dir) == read_ledger(calm.run_dir)


def test_a_new_incarnation_goes_back_to_the_commit_and_refuses_the_old_one(small_run, drive, read_ledger):
    calm = small_run("calm")
    run_async(undisturbed(calm, drive, steps=4))
    hurt = small_run("hurt")

    async def scenario(run):
        run.start("executor")
        run.start("worker", 0)
        old = drive(run)
        await old.open()
        await old.steps(0, 1)
        await old.step(1)
        (run.run_dir / "hold").touch()
        cut = asyncio.ensure_future(old.client.generate(2, 1))
        await run.until(lambda: list((run.run_dir / "running").iterdir()), "groups in flight")
        new = drive(run, generation="1-2")
        assert new.opened.incarnation == 2 and new.opened.step == 1
        await new.open()
        (run.run_dir / "hold").unlink()
        with pytest.raises(RpcRemoteError, match="ended by training incarnation 2"):
            await cut
        with pytest.raises(RpcRemoteError, match="call is of training incarnation 1; the executor is in 2"):
            await old.client.prepare_commit(1)
        with pytest.raises(RpcRemoteError, match="incarnation 1 cannot be opened"):
            await old.open()
        with pytest.raises(RpcRemoteError, match="incarnation 1"):
            await asyncio.to_thread(old.pull, 1)
        await new.steps(1, 4)
        counts = await new.client.counts()
        await old.client.close()
        await new.client.close()
        return counts

    counts = run_async(scenario(hurt))
    assert read_ledger(hurt.run_dir) == read_ledger(calm.run_dir)
    # The superseded ones: a finished, undelivered rollout, and as many groups of the next as the worker had credits.
    assert counts == {"dispatched": 22, "committed": 16, "returned": 0, "dropped": {"superseded": 6}, "in_flight": 0}


def test_a_new_executor_resumes_from_the_commit_with_the_committed_counts(small_run, drive, read_ledger):
    calm = small_run("calm")
    run_async(undisturbed(calm, drive, steps=4))
    hurt = small_run("hurt")

    async def scenario(run):
        executor = run.start("executor")
        run.start("worker", 0)
        old = drive(run)
        await old.open()
        await old.steps(0, 2)
        await old.step(2)
        await old.client.close()
        run.kill(executor)
        run.withdraw("executor")
        run.start("executor", n=2)
        new = drive(run, generation="2-1")
        await new.open()
        await new.steps(2, 4)
        counts = await new.client.counts(final=True)
        await new.client.close()
        return counts

    counts = run_async(scenario(hurt))
    assert counts == {"dispatched": 16, "committed": 16, "returned": 0, "dropped": {}}
    assert read_ledger(hurt.run_dir) == read_ledger(calm.run_dir)


def test_failed_groups_are_dropped_with_reasons_and_replaced_by_the_next_prompts(small_run, drive, read_ledger):
    run = small_run(row=lambda i: {"fails": i == 3, "unscored": i == 5}, config={"data": {"shuffle": False}})
    counts = run_async(undisturbed(run, drive, steps=2))
    assert counts["dropped"] == {"generation_failed": 1, "reward_failed": 1} and counts["committed"] == 8
    assert [line["prompt_index"] for line in read_ledger(run.run_dir)] == [0, 1, 2, 4, 6, 7, 8, 9]
    assert "prompt 3 always fails" in run.logs() and "prompt 5 cannot be scored" in run.logs()


@pytest.mark.parametrize(
    "row, text",
    [
        ({"fails": True}, r"RolloutFailed.*0 of 4 groups finished, \d+ dropped \(generation_failed \d+\)"),
        ({"unscored": True}, r"RewardsFailing.*of 16 reward calls failed, reward.max_failure_rate = 0.2"),
    ],
)
def test_a_rollout_in_which_everything_fails_ends_with_the_reasons(small_run, drive, row, text):
    async def scenario(run):
        run.start("executor")
        run.start("worker", 0)
        driver = drive(run)
        await driver.open()
        with pytest.raises(RpcRemoteError, match=text):
            await driver.client.generate(0, 1)
        counts = await driver.client.counts()
        assert sums(counts) == counts["dispatched"] and counts["in_flight"] == 0
        await driver.client.close()

    run_async(scenario(small_run(row=lambda index: row)))


def test_a_sample_that_hangs_fails_at_its_deadline(small_run, drive):
    async def scenario(run):
        (run.run_dir / "hold").touch()
        run.start("executor")
        run.start("worker", 0)
        driver = drive(run)
        await driver.open()
        with pytest.raises(RpcRemoteError, match=r"generation_timeout .*at 'scripted'"):
            await driver.client.generate(0, 1)
        await driver.client.close()

    run_async(scenario(small_run(config={"rollout": {"sample_timeout_s": 0.3, "batch_size": 4}})))


def test_evaluation_scores_every_prompt_and_leaves_accounts_and_order_alone(small_run, drive, read_ledger):
    calm = small_run("calm")
    run_async(undisturbed(calm, drive, steps=2))
    run = small_run("evaluated", row=lambda i: {"fails": i == 3})
    other = small_run("limited")

    async def scenario(run):
        run.start("executor")
        run.start("worker", 0)
        driver = drive(run)
        await driver.open()
        full = await driver.client.evaluate(1)
        limited = await driver.client.evaluate(1, limit=3)
        if run is other:
            await driver.steps(0, 2)
        counts = await driver.client.counts()
        await driver.client.close()
        return full, limited, counts

    full, limited, counts = run_async(scenario(run))
    assert (full.n, full.failed, limited.n) == (19, 1, 3) and 0 < full.accuracy < 1
    assert counts == {"dispatched": 0, "committed": 0, "returned": 0, "dropped": {}, "in_flight": 0}
    _, _, counts = run_async(scenario(other))
    assert counts["dispatched"] == 8
    assert read_ledger(other.run_dir) == read_ledger(calm.run_dir)


def test_programs_end_promptly_on_sigterm_with_groups_in_flight(small_run, drive):
    async def scenario(run):
        executor, worker = run.start("executor"), run.start("worker", 0)
        (run.run_dir / "hold").touch()
        driver = drive(run)
        await driver.open()
        call = asyncio.ensure_future(driver.client.generate(0, 1))
        await run.until(lambda: run.running(worker.pid), "groups in flight")
        run.kill(worker, signal.SIGTERM)
        run.kill(executor, signal.SIGTERM)
        call.cancel()
        await driver.client.close()
        assert (worker.returncode, executor.returncode) == (0, 0), run.logs()

    run_async(scenario(small_run()), 30)
