"""What an interrupted or left-over group keeps, and what begins anew because it cannot be kept."""

import asyncio

import msgspec
import numpy as np
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout.collect import Collector
from miles_hpc.rollout.data import DataSource, Prompt
from miles_hpc.rollout.generate import Services
from miles_hpc.rollout.group_run import GroupError, GroupInterrupted, GroupRun
from miles_hpc.rollout.groups import groups_of
from miles_hpc.rollout.producer import SyncProducer, partial_of
from miles_hpc.rollout.rewards import checked
from miles_hpc.rollout.sample import GroupSpec, PartialSample, Sample
from miles_hpc.rollout.work_messages import GroupPartial, RunGroup, decode_to_executor, encode
from miles_hpc.transport.batch import RolloutBatch, SampleArrays

pytestmark = pytest.mark.unit

COLUMNS = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "versions": [(1, 1, 2)]}
EXPERTS = {"experts": np.zeros((2, 4), np.int32)}


def sample(index=0, **changes):
    base = {"group": "g", "index": index, "prompt_index": 0, "epoch": 0, "prompt": "p", "seed": 1}
    return Sample(**{**base, **COLUMNS, "status": "completed", **changes})


def restored(partial):
    fresh = Sample(group="g", index=0, prompt_index=0, epoch=0, prompt="p", seed=1)
    partial.restore(fresh, mask=False)
    return fresh


def arrays(index=0, **changes):
    return SampleArrays(
        **{**COLUMNS, "reward": 0.5, "sample_index": index, "texts": {"response": "r"}, **changes},
    )


class Rewards:
    """Counts what it is asked."""

    def __init__(self):
        self.asked = []

    async def score(self, item):
        self.asked.append(item.index)
        return checked(1.0)


def group(generate, rewards, samples=2, partial=()):
    config = msgspec.convert({"rollout": {"partial": True}}, Config)
    spec = GroupSpec(id="g", epoch=0, index=0, prompt_index=0, partial=list(partial))
    order = RunGroup(incarnation=1, spec=spec, prompt=Prompt(prompt="p"), samples=samples, weight_version=1)
    return GroupRun(order, config, Services(config, lambda: {}), generate, rewards)


def finish(item, **changes):
    for name, value in {**COLUMNS, "status": "completed", **changes}.items():
        setattr(item, name, value)


def interrupted(generate, rewards, samples=2):
    async def main():
        run = group(generate, rewards, samples)
        run.interrupt()
        with pytest.raises(GroupInterrupted) as caught:
            await run.run()
        return caught.value.partial

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_a_sample_with_further_arrays_begins_anew():
    again = restored(PartialSample.of(sample(extra=EXPERTS, reward=1.0)))
    assert (again.status, again.token_ids, again.reward) == ("pending", [], None)


def test_numbers_that_no_commit_can_hold_are_not_kept():
    again = restored(PartialSample.of(sample(logprobs=[float("nan"), -1.0])))
    assert (again.status, again.token_ids) == ("pending", [])
    assert restored(PartialSample.of(sample(stats={"a": float("inf"), "b": np.float32(2)}))).stats == {"b": 2.0}


def test_a_finished_sample_keeps_its_reward_and_an_interrupted_one_has_none():
    again = restored(PartialSample.of(sample(reward=checked(0.5), category="format")))
    assert (again.reward, again.category) == (0.5, "format")
    assert restored(PartialSample.of(sample(status="aborted", reward=0.5))).reward is None
    assert restored(PartialSample.of(sample())).reward is None


def test_numbers_of_numpy_and_rewards_can_be_sent():
    columns = {
        "token_ids": list(np.array([1, 2])),
        "loss_mask": np.array([False, True]),
        "logprobs": np.array([0.0, -1.0]),
        "versions": [tuple(np.array([1, 1, 2]))],
    }
    found = PartialSample.of(sample(**columns, reward=checked(0.5)))
    message = GroupPartial(incarnation=1, group="g", samples=[found])
    assert decode_to_executor(encode([message])) == [message]
    assert found == PartialSample(index=0, status="completed", **COLUMNS, reward=0.5)


def test_what_cannot_be_kept_of_a_sample_that_was_given_up_fails_its_group():
    async def generate(item, context):
        finish(item, status="aborted", logprobs=[None, -1.0])

    async def main():
        run = group(generate, Rewards())
        run.interrupt()
        with pytest.raises(GroupError) as caught:
            await run.run()
        assert caught.value.reason == "invalid_sample"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_generation_of_several_samples_begins_anew_and_a_reward_is_not_asked_for_twice():
    async def generate(item, context):
        finish(item, status="aborted" if item.index == 2 else "completed")
        if item.index == 0:
            finish(item, reward=0.25)
        return [item, msgspec.structs.replace(item)] if item.index == 1 else item

    rewards = Rewards()
    partial = interrupted(generate, rewards, samples=4)
    assert [(one.index, one.status, one.reward) for one in partial] == [
        (0, "completed", 0.25),
        (2, "aborted", None),
        (3, "completed", 1.0),
    ]
    assert sorted(rewards.asked) == [1, 1, 3]

    async def end(item, context):
        finish(item)

    again = Rewards()
    packed = asyncio.run(asyncio.wait_for(group(end, again, 4, partial).run(), 20))
    assert [float(one.reward) for one in packed] == [0.25, 1.0, 1.0, 1.0] and sorted(again.asked) == [1, 2]


def test_a_left_over_group_is_kept_where_its_samples_can_be():
    batch = RolloutBatch.pack([arrays(0), arrays(1, reward=0.25, status="truncated")])
    kept = partial_of(batch, rewards=True)
    assert [(one.index, one.status, one.reward) for one in kept] == [(0, "completed", 0.5), (1, "truncated", 0.25)]
    assert kept[0].token_ids == [1, 2] and kept[0].response == "r"
    assert [one.reward for one in partial_of(batch, rewards=False)] == [None, None]
    assert partial_of(RolloutBatch.pack([arrays(0), arrays(0)]), rewards=True) == []
    assert partial_of(RolloutBatch.pack([arrays(0, extra=EXPERTS)]), rewards=True) == []


def test_what_was_counted_of_an_interrupted_group_is_counted_once_when_it_goes_on():
    async def generate(item, context):
        finish(item, status="aborted" if item.index == 0 else "completed", stats={"turns": 2.0})

    async def go_on(item, context):
        finish(item, stats={"turns": item.stats["turns"] + 1})

    again = group(go_on, Rewards(), partial=interrupted(generate, Rewards()))
    asyncio.run(asyncio.wait_for(again.run(), 20))
    assert again.stats == {"turns": 5.0}


def test_what_was_counted_of_a_left_over_group_is_counted_once_when_it_comes_again():
    batch = RolloutBatch.pack([arrays(0, texts={"response": "no " * 1000}), arrays(1)])
    counted = {"turns": 5.0, "repetitive": 1.0, "category/format": 1.0, "lost": float("nan")}
    kept = partial_of(batch, ["format", ""], counted, rewards=True)
    again = group(None, Rewards(), partial=kept)
    asyncio.run(asyncio.wait_for(again.run(), 20))
    assert again.stats == {"turns": 5.0, "repetitive": 1.0, "category/format": 1.0}


class Dispatched:
    """Stands where the dispatcher stands when nothing is open."""

    def settle(self, groups, how):
        assert how == "returned"


@pytest.mark.parametrize("scope, reward", [("sample", 0.5), ("group", None)])
def test_rewards_of_a_left_over_group_are_kept_unless_the_group_was_scored_as_a_whole(scope, reward):
    settings = {"reward": {"scope": scope}, "rollout": {"partial": True}}
    source = DataSource(10, seed=1, shuffle=False)
    (spec,) = source.next(1)
    collector = Collector("r")
    (collector.results[spec.id],) = groups_of(RolloutBatch.pack([arrays()]), [1])
    collector.results[spec.id].categories, collector.results[spec.id].stats = ["format"], {"turns": 2.0}
    producer = SyncProducer(msgspec.convert(settings, Config), source, 10, Dispatched(), None)
    asyncio.run(producer._return_rest(collector, {spec.id: spec}, set()))
    (kept,) = source.next(1)[0].partial
    assert kept.stats == {"turns": 2.0}
    assert kept.reward == reward and kept.category == ("format" if reward else "")


def test_words_of_rewards_go_with_their_samples_or_not_at_all():
    async def generate(item, context):
        finish(item)

    class Sorting(Rewards):
        words = ()

        async def score(self, item):
            return checked({"reward": 1.0, "category": self.words[item.index]})

    rewards = Sorting()
    for rewards.words, told in ((["format", ""], ["format", ""]), (["", ""], [])):
        run = group(generate, rewards)
        asyncio.run(asyncio.wait_for(run.run(), 20))
        assert run.categories == told
