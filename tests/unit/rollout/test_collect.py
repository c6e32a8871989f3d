import asyncio

import pytest

from miles_hpc.rollout.collect import Collector, RewardsFailing, RolloutFailed
from miles_hpc.transport.batch import RolloutBatch

pytestmark = pytest.mark.unit

EMPTY = RolloutBatch.pack([])


def check(collector, rate=0.25, rows=100, batches=100):
    collector.check(batch_size=4, samples=4, max_failure_rate=rate, rows=rows, max_filtered_batches=batches)


def test_failed_rewards_end_a_rollout_past_the_rate_and_not_before():
    collector = Collector("rollout 3")
    for number in range(4):
        collector.on_drop(f"g{number}", "reward_failed", "Traceback: no rule", 2)
    check(collector)
    collector.on_drop("g4", "reward_timeout", "too slow", 2)
    with pytest.raises(RewardsFailing, match=r"rollout 3: 5 of 16 reward calls failed.*0\.25.*too slow"):
        check(collector)


def test_a_rate_of_one_still_ends_when_everything_fails():
    collector = Collector("rollout 3")
    for number in range(9):
        collector.on_drop(f"g{number}", "reward_failed", "no rule", 1)
    with pytest.raises(RolloutFailed, match=r"0 of 4 groups finished, 9 dropped \(reward_failed 9\)"):
        check(collector, rate=1.0)


def test_prompts_that_are_too_long_end_a_rollout_only_when_all_are():
    collector = Collector("rollout 3")
    for number in range(100):
        collector.on_drop(f"g{number}", "prompt_too_long", "prompt 1 has 9 tokens", 0)
    check(collector)
    collector.on_drop("g", "prompt_too_long", "prompt 1 has 9 tokens", 0)
    with pytest.raises(RolloutFailed, match=r"prompt_too_long 101.*prompt 1 has 9 tokens"):
        check(collector)


def test_a_rollout_in_which_filters_refuse_batch_after_batch_ends_with_the_table_of_reasons():
    collector = Collector("rollout 3")
    for number in range(8):
        collector.on_drop(f"g{number}", f"filtered_zero_std_{number % 2}", "filtered out", 1)
    check(collector, batches=2)
    collector.on_drop("g9", "filtered_zero_std_0", "filtered out", 1)
    with pytest.raises(RolloutFailed, match=r"9 dropped \(filtered_zero_std_0 5, filtered_zero_std_1 4\)"):
        check(collector, batches=2)


def test_a_wait_returns_after_a_change_and_raises_what_ended_the_call():
    async def scenario():
        collector = Collector("rollout 3")
        collector.expect(["a", "b"])
        collector.on_result("a", EMPTY, 4)
        await collector.wait()
        assert collector.open == {"b"} and list(collector.results) == ["a"] and collector.reward_calls == 4
        collector.fail(ValueError("over"))
        with pytest.raises(ValueError, match="over"):
            await collector.wait()

    asyncio.run(scenario())
