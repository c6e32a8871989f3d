"""Rewards that are scored together: gathered from all groups within a short bound, and failed one by one."""

import asyncio

import pytest

from miles_hpc.rollout.rewards import Reward, RewardError, RewardTimeout, Scorer, checked, plain
from miles_hpc.rollout.sample import Sample

pytestmark = pytest.mark.unit

calls: list[list[str]] = []


async def lengths(samples):
    calls.append([sample.response for sample in samples])
    if any(sample.response == "bad" for sample in samples):
        raise KeyError("no rule for bad")
    if any(sample.response == "cancel" for sample in samples):
        raise asyncio.CancelledError
    if any(sample.response == "hang" for sample in samples):
        await asyncio.sleep(60)
    if any(sample.response == "short" for sample in samples):
        return [1.0]
    return [float("nan") if sample.response == "nan" else len(sample.response) for sample in samples]


@pytest.fixture(autouse=True)
def functions(monkeypatch):
    calls.clear()
    monkeypatch.setattr("miles_hpc.rollout.rewards.load_function", lambda path, key: lengths)


def sample(response, group="g"):
    return Sample(group=group, index=0, prompt_index=0, epoch=0, prompt="p", seed=1, response=response)


def score(*responses, size=64, wait_s=0.05, timeout_s=10.0):
    async def run():
        scorer = Scorer("m:lengths", timeout_s=timeout_s, batch_size=size, batch_wait_s=wait_s)
        samples = [sample(text, group=f"g{number}") for number, text in enumerate(responses)]
        try:
            return await asyncio.gather(*(scorer.score(one) for one in samples), return_exceptions=True)
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_samples_of_different_groups_are_scored_by_one_call():
    assert score("a", "bb", "ccc") == [1.0, 2.0, 3.0]
    assert calls == [["a", "bb", "ccc"]]


def test_a_full_batch_does_not_wait_and_what_is_left_waits_only_so_long():
    # Were the wait not cut short by the size, this would take a minute.
    assert score("a", "bb", "ccc", "dddd", size=2, wait_s=60.0) == [1.0, 2.0, 3.0, 4.0]
    assert calls == [["a", "bb"], ["ccc", "dddd"]]
    calls.clear()
    assert score("a", "bb", "ccc", size=2) == [1.0, 2.0, 3.0] and calls == [["a", "bb"], ["ccc"]]


def test_only_the_sample_that_is_to_blame_fails_when_a_call_raises():
    good, bad, other = score("a", "bad", "ccc")
    assert (good, other) == (1.0, 3.0)
    assert isinstance(bad, RewardError) and "no rule for bad" in str(bad) and "Traceback" in str(bad)
    assert calls == [["a", "bad", "ccc"], ["a"], ["bad"], ["ccc"]]


def test_only_the_sample_that_is_to_blame_fails_when_a_call_hangs_or_gives_a_nan():
    good, bad = score("a", "hang", timeout_s=0.1)
    assert good == 1.0 and isinstance(bad, RewardTimeout) and "reward.timeout_s = 0.1" in str(bad)
    good, bad = score("a", "nan")
    assert good == 1.0 and isinstance(bad, RewardError) and "expected a finite number" in str(bad)


def test_a_call_must_answer_for_each_sample():
    first, second = score("short", "b")
    assert first == 1.0  # alone it gets the one number that it is due
    assert second == 1.0 and calls == [["short", "b"], ["short"], ["b"]]


def test_a_sample_that_nobody_waits_for_any_more_is_not_scored():
    async def run():
        scorer = Scorer("m:lengths", timeout_s=10, batch_size=8, batch_wait_s=0.05)
        gone = asyncio.ensure_future(scorer.score(sample("gone")))
        kept = asyncio.ensure_future(scorer.score(sample("kept")))
        await asyncio.sleep(0)
        gone.cancel()
        assert await kept == 4.0
        await scorer.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert calls == [["kept"]]


def test_a_call_that_is_cancelled_from_inside_cancels_whoever_waits_for_it():
    found = score("a", "cancel")
    assert [type(one) for one in found] == [asyncio.CancelledError] * 2


def test_whoever_waits_for_a_call_is_cancelled_when_the_scorer_closes():
    async def run():
        scorer = Scorer("m:lengths", timeout_s=10, batch_size=1, batch_wait_s=0.05)
        waiting = asyncio.ensure_future(scorer.score(sample("hang")))
        while not calls:  # noqa: ASYNC110 - the bound is that of the test
            await asyncio.sleep(0)
        await scorer.close()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_reward_may_name_a_category():
    found = checked({"reward": 0.5, "category": "format"})
    assert found == 0.5 and found.category == "format" and isinstance(found, Reward)
    assert checked(2).category == ""
    for wrong in ({"score": 1}, "x", None, {"reward": float("inf")}):
        with pytest.raises(RewardError, match=r"expected a (finite )?number"):
            checked(wrong)


def test_what_a_function_returned_leaves_its_process_in_a_plain_form():
    assert plain([1, {"reward": 2, "category": "a", "more": object()}]) == [1.0, {"reward": 2.0, "category": "a"}]
    with pytest.raises(RewardError, match="expected a number"):
        checked(plain({1, 2}))
