import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from miles_hpc.config.schema import TrainConfig
from miles_hpc.rollout.convert import Generations, TrainBatch, TrainData, UnevenSplit, advantages_of
from miles_hpc.rollout.groups import Gathered
from miles_hpc.rollout.metrics import pass_at_k, rollout_metrics
from miles_hpc.rollout.split import split_samples
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.columns import SchemaError
from miles_hpc.transport.parcel import Packing

pytestmark = pytest.mark.unit


def group(rewards, prompt=2, response=3, status="completed", version=4):
    return RolloutBatch.pack(
        [
            SampleArrays(
                token_ids=list(range(index, index + prompt + response)),
                loss_mask=[0] * prompt + [1] * response,
                logprobs=[-9.0] * prompt + [-1.0 - index] * response,
                reward=reward,
                versions=[(version, prompt, prompt + response)],
                status=status,
                sample_index=index,
            )
            for index, reward in enumerate(rewards)
        ]
    )


def data(*rewards, **train):
    return TrainData(
        Gathered.alone([group(r) for r in rewards]), rollout_id=3, weight_version=7, train=TrainConfig(**train)
    )


def generations(*groups):
    return Generations(Gathered.alone(groups))


def shards(made, size):
    return [TrainBatch.from_parcel(made.shard(rank, size).to_bytes()) for rank in range(size)]


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 16), elements=st.floats(-100, 100, width=32)), st.booleans())
def test_advantages_of_a_group_sum_to_nothing_and_keep_the_order(rewards, normalize):
    advantages = advantages_of(generations(group(rewards)), "grpo", normalize=normalize)
    assert advantages.dtype == np.float32 and abs(advantages.sum(dtype=np.float64)) < 1e-3
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()
    if normalize and np.ptp(rewards) > 0.1:
        assert advantages.std() == pytest.approx(1.0, abs=1e-3)


def test_a_group_of_equal_rewards_teaches_nothing():
    assert advantages_of(generations(group([1, 1, 1])), "grpo", normalize=True).tolist() == [0, 0, 0]


def test_each_estimator_gives_its_own_advantages():
    groups = [group([0, 1, 2]), group([4, 4, 4])]

    def plain(name, normalize=False):
        return [round(float(value), 3) for value in advantages_of(generations(*groups), name, normalize=normalize)]

    assert plain("none") == [0, 1, 2, 4, 4, 4]
    assert plain("grpo") == plain("gspo") == [-1, 0, 1, 0, 0, 0]
    assert plain("gspo", True) == [-1.225, 0, 1.225, 0, 0, 0]
    assert plain("rloo") == [-1.5, 0, 1.5, 0, 0, 0]  # 0 - mean(1, 2), …
    assert plain("reinforce++_baseline") == [-1.732, 0, 1.732, 0, 0, 0]
    whitened = np.array(plain("reinforce++"))
    assert abs(whitened.mean()) < 1e-3 and whitened.std() == pytest.approx(1, abs=1e-3)


def several(rewards, generations):
    base = group(rewards)
    return dataclasses.replace(base, sample_index=np.array(generations, np.int64))


def test_samples_of_one_generation_share_its_advantage_and_count_once():
    made = advantages_of(generations(several([1, 1, 0], [0, 0, 1])), "grpo", normalize=False)
    assert made.tolist() == [0.5, 0.5, -0.5]
    with pytest.raises(ValueError, match=r"generation 0 of group 0 have rewards 1 and 0"):
        generations(several([1, 0], [0, 0]))


def test_ranks_get_equal_shares_of_the_same_samples():
    made = shards(data([0, 1, 0, 1], [1, 1, 0, 0], [2, 0, 0, 0]), 2)
    assert [len(shard) for shard in made] == [6, 6]
    assert made[0].group_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert made[1].sample_index.tolist() == [1, 3, 1, 3, 1, 3]
    np.testing.assert_array_equal(np.concatenate([s.rewards for s in made]), [0, 0, 1, 0, 2, 0, 1, 1, 1, 0, 0, 0])
    assert made[0].token_ids[:10].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert {(s.total_samples, s.total_response_tokens, s.dp_size) for s in made} == {(12, 36, 2)}
    assert (made[0].rollout_id, made[0].weight_version, made[1].dp_rank) == (3, 7, 1)
    assert made[0].oldest_version.tolist() == [4] * 6 and made[0].micro_batches.tolist() == [0, 6]
    with pytest.raises(ValueError, match="read-only"):
        made[0].token_ids[0] = 1


def test_further_columns_reach_the_ranks_and_must_be_the_same_in_all_groups():
    def routed(dtype):
        return RolloutBatch.pack(
            [SampleArrays([1, 2], [0, 1], [0, -1], 1.0, extra={"routed": np.array([[1, 2], [3, 4]], dtype)})]
        )

    made = TrainData(Gathered.alone([routed(np.int32)] * 2), rollout_id=0, weight_version=0, train=TrainConfig())
    assert shards(made, 2)[1].extra["routed"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(SchemaError, match=r"group 1 of the rollout has extra columns \{'routed': 'int64'\}"):
        TrainData(
            Gathered.alone([routed(np.int32), routed(np.int64)]), rollout_id=0, weight_version=0, train=TrainConfig()
        )


def test_samples_that_do_not_divide_are_refused_with_both_settings():
    with pytest.raises(UnevenSplit, match=r"4 samples do not divide by 3 \(train.ranks .*rollout.batch_size"):
        data([0, 1], [1, 0]).shard(0, 3)
    with pytest.raises(UnevenSplit, match=r"dp_rank 2 is outside 0..1"):
        data([0, 1]).shard(2, 2)


def test_uneven_samples_are_trimmed_or_padded_as_configured_and_that_is_said():
    trimmed = data([0, 1], [1, 0, 0], uneven="trim")
    assert [len(shard) for shard in shards(trimmed, 2)] == [2, 2] and "the last 1 are left out" in trimmed.shares(2)[1]
    padded = data([0, 1], [1, 0, 0], uneven="pad")
    first, second = shards(padded, 2)
    assert len(first) == len(second) == 3 and (first.padding, second.padding) == (0, 1)
    assert second.advantages[-1] == 0 and not second.response_mask[second.offsets[-2] :].any()
    assert first.response_mask[first.offsets[-2] :].any() and "repeated 1 times without loss" in padded.shares(2)[1]


def test_something_else_is_refused():
    with pytest.raises(SchemaError, match="lacks"):
        TrainBatch.from_parcel(Packing("train_batch", {"offsets": np.zeros(1, np.int64)}).to_bytes())
    with pytest.raises(ValueError, match="no groups"):
        TrainData(Gathered.alone([]), rollout_id=1, weight_version=1, train=TrainConfig())


lengths = hnp.arrays(np.int64, st.integers(1, 6).map(lambda n: 24 * n), elements=st.integers(0, 500))


@settings(deadline=None)
@given(
    lengths,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["strided", "balanced"]),
    st.sampled_from([0, 100, 700]),
    st.sampled_from([1, 2]),
)
def test_every_sample_has_one_rank_and_every_rank_as_many_micro_batches(lengths, size, split, budget, updates):
    train = TrainConfig(split=split, max_tokens_per_micro_batch=budget, updates_per_step=updates)
    shares, note = split_samples(lengths, size, train)
    assert sorted(np.concatenate([share.rows for share in shares])) == list(range(len(lengths))) and not note
    assert {len(share.rows) for share in shares} == {len(lengths) // size}
    assert len({len(share.micro_batches) for share in shares}) == 1
    for share in shares:
        assert share.micro_batches[0] == 0 and share.micro_batches[-1] == len(share.rows)
        assert not budget or len(share.rows) // updates in share.micro_batches, "an update ends with a micro-batch"
        for start, stop in itertools.pairwise(share.micro_batches.tolist()):
            tokens = lengths[share.rows[start:stop]]
            assert not budget or tokens.sum() <= budget or len(tokens) == 1


@settings(deadline=None)
@given(hnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 150)), st.integers(1, 120))
def test_each_sample_goes_into_the_first_micro_batch_that_has_room(lengths, budget):
    bins, room = [], []
    for row in np.argsort(-lengths, kind="stable").tolist():
        place = next((place for place, left in enumerate(room) if lengths[row] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(row)
        room[place] -= lengths[row]
    share = split_samples(lengths, 1, TrainConfig(max_tokens_per_micro_batch=budget))[0][0]
    assert share.rows.tolist() == [row for one in bins for row in one]
    assert np.diff(share.micro_batches).tolist() == [len(one) for one in bins]


def test_packing_many_samples_takes_no_longer_for_each():
    lengths = np.random.default_rng(0).integers(1, 1000, 60_000)
    begun = time.process_time()
    split_samples(lengths, 1, TrainConfig(max_tokens_per_micro_batch=4000))
    assert time.process_time() - begun < 5  # each with each took minutes


def test_balanced_ranks_have_about_as_many_tokens():
    lengths = np.array([1000, 10, 10, 10, 900, 10, 10, 10])
    balanced, _ = split_samples(lengths, 2, TrainConfig(split="balanced"))
    assert [int(lengths[share.rows].sum()) for share in balanced] == [1030, 930]


def test_metrics_count_generated_tokens_and_kinds_of_groups():
    groups = [group([0, 0]), group([0, 1], response=5, status="truncated")]
    metrics = rollout_metrics(groups, generations(*groups))
    assert metrics == {
        "response_tokens_mean": 4.0,
        "response_tokens_median": 4.0,
        "response_tokens_min": 3.0,
        "response_tokens_max": 5.0,
        "truncated": 0.5,
        "reward_std": 0.25,
        "groups_with_equal_rewards": 0.5,
        "groups_all_0": 0.5,
        "groups_solved_once": 0.5,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "weight_version_min": 4.0,
        "weight_version_max": 4.0,
        "mixed_versions": 0.0,
    }


def test_pass_at_k_counts_complete_groups_only_and_is_unbiased():
    assert pass_at_k(generations(group([1, 0, 0, 0]), group([0, 0, 0, 0]), group([1]))) == {
        "pass@1": 0.125,
        "pass@2": 0.25,
        "pass@4": 0.5,
    }


def test_a_digest_covers_tokens_mask_and_rewards_only():
    base = group([0, 1])
    others = [group([1, 0]), group([0, 1], prompt=3), group([0, 1], response=2)]
    assert Gathered.alone([group([0, 1], version=9)]).digests() == Gathered.alone([base]).digests()
    assert Gathered.alone([group([0, 1], version=9)]).versions() == [[9]]
    assert len(set(Gathered.alone([base, *others]).digests())) == 4
