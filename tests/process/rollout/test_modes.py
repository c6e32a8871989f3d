"""Ways in which a rollout comes about: over-sampled, partial, filtered, asynchronous, replayed, in real programs."""

import asyncio
import json

import numpy as np
import pytest

from miles_hpc.rollout.debug import read_rollout
from miles_hpc.wire.rpc import RpcRemoteError

pytestmark = pytest.mark.process


def go(run, scenario, timeout_s=60):
    asyncio.run(asyncio.wait_for(scenario, timeout_s))


def config(generate, reward="modes:by_index", **rollout):
    return {
        "rollout": {"generate": f"modes:{generate}", "concurrency": 8, **rollout},
        "reward": {"function": reward},
        "data": {"shuffle": False},
    }


async def begin(run, drive, workers=2, **arguments):
    run.start("executor")
    for index in range(workers):
        run.start("worker", index)
    driver = drive(run, **arguments)
    await driver.open()
    return driver


def test_an_over_sampled_step_returns_what_is_left_over_and_no_prompt_is_lost(small_run, drive, read_ledger):
    run = small_run(prompts=12, config=config("uneven", over_sampling=1.5))

    async def scenario():
        driver = await begin(run, drive)
        for rollout in range(1, 4):
            result, _ = await driver.step(rollout)
            assert len(result.groups) == 4
            await driver.commit(rollout)
        counts = await driver.client.counts(final=True)
        assert counts["dispatched"] == counts["committed"] + counts["returned"] and counts["committed"] == 12
        assert counts["returned"] > 0
        await driver.client.close()

    go(run, scenario())
    groups = [line["group"] for line in read_ledger(run.run_dir)]
    assert len(groups) == len(set(groups)) == 12


def test_partial_groups_go_on_from_the_tokens_they_had_and_old_ones_are_masked(small_run, drive):
    run = small_run(
        prompts=12, config=config("uneven", over_sampling=1.5, partial=True, mask_off_policy=True, samples_per_prompt=2)
    )

    async def scenario():
        driver = await begin(run, drive)
        await driver.step(1)
        data = await driver.commit(1)
        kept = [group for group in data.data_state["buffer"] if group["partial"]]
        assert kept and all(len(sample["token_ids"]) > 2 for group in kept for sample in group["partial"])
        json.dumps(kept)  # readable in the commit
        lengths = {group["id"]: len(group["partial"][0]["token_ids"]) for group in kept}
        resumed = 0
        for rollout in range(2, 5):
            result, shards = await driver.step(rollout, version=rollout)
            for shard in shards:
                for row in range(len(shard)):
                    name = result.groups[int(shard.group_index[row])]
                    mask = shard.response_mask[int(shard.offsets[row]) : int(shard.offsets[row + 1])]
                    if name in lengths and shard.sample_index[row] == 0:
                        resumed += 1
                        # `fill` writes a mask of its own; what the worker gave the function was masked.
                        assert len(mask) > lengths[name]
            await driver.commit(rollout, version=rollout)
        assert resumed == len(lengths)
        counts = await driver.client.counts(final=True)
        assert counts["dispatched"] == counts["committed"] + counts["returned"]
        await driver.client.close()

    go(run, scenario())


def test_filters_drop_groups_in_the_workers_and_count_their_reasons(small_run, drive, read_ledger):
    run = small_run(
        prompts=20, config=config("of_version", "modes:by_prompt", filters=["nonzero_std", "modes:only_even"])
    )

    async def scenario():
        driver = await begin(run, drive)
        result, _ = await driver.step(1)
        await driver.commit(1)
        assert result.metrics["dropped_filtered_zero_std_1"] >= 3
        counts = await driver.client.counts()
        assert counts["dropped"] == {"filtered_zero_std_1": int(result.metrics["dropped_filtered_zero_std_1"])}
        await driver.client.close()

    go(run, scenario())
    assert all(line["prompt_index"] % 2 == 0 for line in read_ledger(run.run_dir))


def test_a_run_whose_groups_are_all_filtered_out_ends_with_the_reasons_instead_of_spinning(small_run, drive):
    run = small_run(
        prompts=500, config=config("of_version", "modes:always_one", filters=["nonzero_std"], max_filtered_batches=3)
    )

    async def scenario():
        driver = await begin(run, drive)
        with pytest.raises(RpcRemoteError, match=r"0 of 4 groups finished, .*filtered_zero_std_1 \d+"):
            await driver.client.generate(1, 1)
        assert (await driver.client.counts())["in_flight"] == 0
        await driver.client.close()

    go(run, scenario())


def test_one_generation_may_become_several_samples_that_share_its_advantage(small_run, drive):
    run = small_run(config=config("parts", samples_per_prompt=2))

    async def scenario():
        driver = await begin(run, drive)
        result, shards = await driver.step(1)
        assert sum(len(shard) for shard in shards) == 4 * 2 * 2
        for group in range(4):
            found = {}
            for shard in shards:
                for row in np.flatnonzero(shard.group_index == group):
                    found.setdefault(int(shard.sample_index[row]), set()).add(float(shard.advantages[row]))
            assert all(len(values) == 1 for values in found.values()) and len(found) == 2
        assert result.metrics["pass@1"] == 0.5
        await driver.client.close()

    go(run, scenario())


def test_a_failed_sample_is_generated_again_where_that_is_asked_for(small_run, drive):
    run = small_run(config=config("fails_once", on_failed_sample="backfill"))

    async def scenario():
        driver = await begin(run, drive)
        await driver.step(1)
        assert (await driver.client.counts())["dropped"] == {}
        await driver.client.close()

    go(run, scenario())


def test_a_group_reward_sees_all_samples_of_a_group(small_run, drive):
    settings = config("of_version")
    settings["reward"] = {"function": "modes:ranks", "scope": "group"}
    run = small_run(config=settings)

    async def scenario():
        driver = await begin(run, drive)
        result, _ = await driver.step(1)
        assert result.reward_mean == 1.5
        await driver.client.close()

    go(run, scenario())


def test_tokens_of_weights_that_were_never_published_are_refused(small_run, drive):
    run = small_run(config=config("of_version"))
    (run.run_dir / "version").write_text("7")

    async def scenario():
        driver = await begin(run, drive)
        with pytest.raises(RpcRemoteError, match=r"unpublished_version.*weight version 7"):
            await driver.client.generate(1, 1)
        (run.run_dir / "weights").mkdir()
        (run.run_dir / "weights" / "00007.json").write_text("{}")
        assert (await driver.client.generate(2, 1)).groups
        with pytest.raises(RpcRemoteError, match="versions only grow"):
            await driver.client.generate(3, 0)
        await driver.client.close()

    go(run, scenario())


def asynchronous(generate="of_version", **rollout):
    return {**config(generate, **rollout), "mode": "async"}


def test_mode_async_generates_ahead_by_the_staleness_bound_and_commits_a_prefix_of_the_data_order(
    small_run, drive, read_ledger
):
    # A group that comes late may be too stale when it is taken: it then goes back into the order, and leaves no gap.
    run = small_run(prompts=100, config=asynchronous(max_staleness=1, on_stale="retry"))

    async def scenario():
        driver = await begin(run, drive)
        for rollout in range(1, 6):
            await driver.step(rollout, version=rollout)
            await driver.commit(rollout, version=rollout)
            counts = await driver.client.counts()
            # (max_staleness + trained + 1) x batch, and never more.
            assert counts["dispatched"] - counts["returned"] <= (1 + rollout) * 4
            assert counts["committed"] == 4 * rollout and not counts["dropped"]
        state = driver.log.newest.data_state
        done = {line["group"] for line in read_ledger(run.run_dir)}
        waiting = {group["id"] for group in state["buffer"]}
        assert not done & waiting and len(done) == 20
        order = [f"e00000-i{index:09d}" for index in range(state["offset"])]
        assert sorted(done | waiting) == order  # no gap
        counts = await driver.client.counts(final=True)
        assert counts["dispatched"] == counts["committed"] + counts["returned"]
        await driver.client.close()
        # Another attempt goes on with what had been returned.
        again = drive(run, generation="1-2")
        await again.open()
        await again.step(6, version=6)
        await again.commit(6, version=6)
        state = again.log.newest.data_state
        await again.client.close()
        return state

    state = asyncio.run(asyncio.wait_for(scenario(), 60))
    groups = [line["group"] for line in read_ledger(run.run_dir)]
    assert len(groups) == len(set(groups)) == 24
    waiting = {group["id"] for group in state["buffer"]}
    assert sorted({*groups, *waiting}) == [f"e00000-i{index:09d}" for index in range(state["offset"])]


def test_groups_that_are_too_stale_are_dropped_and_counted(small_run, drive):
    run = small_run(prompts=100, config=asynchronous(max_staleness=1, on_stale="drop"))
    (run.run_dir / "version").write_text("1")

    async def scenario():
        driver = await begin(run, drive)
        for rollout in (1, 2):
            await driver.step(rollout, version=rollout)
            await driver.commit(rollout, version=rollout)
        # From here on version 1 is two behind, and what waits was drawn from it.
        (run.run_dir / "version").unlink()
        result, _ = await driver.step(3, version=3)
        assert result.metrics["stale_groups"] > 0 and result.metrics["staleness_max"] <= 1
        assert set((await driver.client.counts())["dropped"]) == {"stale"}
        await driver.commit(3, version=3)
        await driver.client.close()

    go(run, scenario())


def test_a_saved_rollout_is_trained_on_again_without_workers(small_run, drive, read_ledger):
    run = small_run(config=config("of_version", save_debug=True))

    async def first():
        driver = await begin(run, drive)
        made = await driver.step(1)
        await driver.commit(1)
        await driver.client.close()
        return made

    result, shards = asyncio.run(asyncio.wait_for(first(), 60))
    saved, batch = read_rollout(run.run_dir / "rollouts" / "00001.parcel")
    assert saved.rollout_id == 1 and [spec.id for spec in saved.specs] == result.groups and len(batch) == 16
    replay = small_run("replay", config=config("of_version", load_debug=str(run.run_dir / "rollouts")))

    async def second():
        driver = await begin(replay, drive, workers=0)
        made = await driver.step(1)
        await driver.commit(1)
        with pytest.raises(RpcRemoteError, match="not a saved rollout"):
            await driver.client.generate(2, 1)
        await driver.client.close()
        return made

    again, replayed = asyncio.run(asyncio.wait_for(second(), 60))
    assert again.groups == result.groups and again.reward_mean == result.reward_mean
    for one, other in zip(shards, replayed, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.advantages, other.advantages)
    assert [line["digest"] for line in read_ledger(replay.run_dir)] == [
        line["digest"] for line in read_ledger(run.run_dir)
    ]


def test_several_evaluation_sets_with_settings_of_their_own_and_rows_on_disk(small_run, drive):
    settings = config("of_version")
    run = small_run(prompts=5, config=settings)
    data = str(run.run_dir / "prompts.jsonl")
    other = small_run(
        "sets",
        prompts=5,
        config={
            **settings,
            "eval": {
                "datasets": {
                    "hard": {"data": data, "samples": 4, "temperature": 0.7, "generate": "modes:of_version"},
                    "few": {"data": f"{data}@[1:3]", "generate": "modes:of_version"},
                }
            },
        },
    )

    async def scenario():
        driver = await begin(other, drive)
        await driver.step(1)
        found = await driver.client.evaluate(1)
        assert (found.accuracy, found.n, found.failed) == (0.0, 5, 0)
        assert found.metrics["hard/pass@1"] == 0.5 and found.metrics["hard/pass@4"] == 1.0
        assert found.metrics["few/reward"] == 0.0 and "few/pass@2" not in found.metrics
        counts = await driver.client.counts()
        assert counts["dispatched"] == 4
        await driver.client.close()

    go(other, scenario())
    rows = [json.loads(line) for line in (other.run_dir / "eval" / "00001-hard.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and {row["sample"] for row in rows} == {0, 1, 2, 3}
    assert len((other.run_dir / "eval" / "00001-few.jsonl").read_text().splitlines()) == 2


def test_prompts_may_come_from_a_function_and_keep_keys_that_are_passed_through(small_run, drive):
    settings = config("of_version")
    settings["data"] = {"source": "modes:rows", "prompts": "", "heldout": "", "multimodal_keys": ["image"]}
    run = small_run(config=settings)

    async def scenario():
        run.start("executor")
        run.start("worker")
        driver = drive(run)
        assert await driver.open() == {"prompts": 6, "heldout": 0}
        await driver.step(1)
        await driver.client.close()

    go(run, scenario())


def test_samples_that_end_make_room_at_once_where_credits_count_samples(small_run, drive):
    settings = config("stepped", submission="sample")
    settings["rollout"] |= {"concurrency": 1, "batch_size": 8}
    run = small_run(config=settings)

    async def scenario():
        driver = await begin(run, drive, workers=1)
        await driver.client.generate(1, 1)
        await driver.client.close()

    go(run, scenario())
    crowd = [line.split() for line in (run.run_dir / "crowd").read_text().splitlines()]
    assert max(int(samples) for samples, _ in crowd) == 4
    assert max(int(groups) for _, groups in crowd) == 2  # the next group begins while a slow sample is left
