import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from miles_hpc.rollout.convert import TrainBatch, UnevenSplit, group_advantages, rollout_metrics, to_train_batch
from miles_hpc.rollout.sample import Sample, group_digest, group_versions
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.columns import SchemaError, encode_columns

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


def batch(*rewards):
    return to_train_batch([group(r) for r in rewards], rollout_id=3, weight_version=7, normalize=True)


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 16), elements=st.floats(-100, 100, width=32)), st.booleans())
def test_advantages_of_a_group_sum_to_nothing_and_keep_the_order(rewards, normalize):
    advantages = group_advantages(rewards, normalize=normalize)
    assert advantages.dtype == np.float32 and abs(advantages.sum(dtype=np.float64)) < 1e-3
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()
    if normalize and np.ptp(rewards) > 0.1:
        assert advantages.std() == pytest.approx(1.0, abs=1e-3)


def test_a_group_of_equal_rewards_teaches_nothing():
    assert group_advantages(np.float32([1, 1, 1]), normalize=True).tolist() == [0, 0, 0]


def test_ranks_get_equal_shares_of_the_same_samples():
    whole = batch([0, 1, 0, 1], [1, 1, 0, 0], [2, 0, 0, 0])
    shards = [whole.split(rank, 2) for rank in range(2)]
    assert [len(shard) for shard in shards] == [6, 6]
    assert shards[0].group_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert shards[1].sample_index.tolist() == [1, 3, 1, 3, 1, 3]
    np.testing.assert_array_equal(np.concatenate([s.rewards for s in shards]), [0, 0, 1, 0, 2, 0, 1, 1, 1, 0, 0, 0])
    assert shards[0].token_ids[:10].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert {(s.total_samples, s.total_response_tokens, s.dp_size) for s in shards} == {(12, 36, 2)}


def test_log_probs_outside_the_mask_are_zero():
    assert batch([0, 1]).logprobs[:5].tolist() == [0, 0, -1, -1, -1]


def test_a_shard_passes_the_wire_unchanged():
    shard = batch([0, 1], [1, 0]).split(1, 2)
    again = TrainBatch.from_frames([bytes(frame) for frame in shard.to_frames()])
    assert (again.rollout_id, again.weight_version, again.dp_rank) == (3, 7, 1)
    for name in ("token_ids", "offsets", "response_mask", "logprobs", "advantages", "rewards", "group_index"):
        np.testing.assert_array_equal(getattr(again, name), getattr(shard, name))
        assert getattr(again, name).dtype == getattr(shard, name).dtype


def test_samples_that_do_not_divide_are_refused_with_both_settings():
    with pytest.raises(UnevenSplit, match=r"4 samples .*rollout.batch_size.* 3 ranks \(train.ranks\)"):
        batch([0, 1], [1, 0]).split(0, 3)
    with pytest.raises(UnevenSplit, match=r"dp_rank 2 is outside 0..1"):
        batch([0, 1]).split(2, 2)


def test_frames_of_something_else_are_refused():
    with pytest.raises(SchemaError, match="lacks"):
        TrainBatch.from_frames(encode_columns("train_batch", {"offsets": np.zeros(1, np.int64)}))
    with pytest.raises(ValueError, match="no groups"):
        to_train_batch([], rollout_id=1, weight_version=1, normalize=True)


def test_metrics_count_generated_tokens_and_kinds_of_groups():
    metrics = rollout_metrics([group([0, 0]), group([0, 1], response=5, status="truncated")])
    assert metrics == {
        "response_tokens_mean": 4.0,
        "response_tokens_max": 5.0,
        "truncated": 0.5,
        "groups_with_equal_rewards": 0.5,
        "groups_solved_once": 0.5,
    }


def test_a_digest_covers_tokens_mask_and_rewards_only():
    base = group([0, 1])
    assert group_digest(group([0, 1], version=9)) == group_digest(base)
    assert group_versions(group([0, 1], version=9)) == [9]
    assert (
        len({group_digest(g) for g in (base, group([1, 0]), group([0, 1], prompt=3), group([0, 1], response=2))}) == 4
    )


def test_a_sample_without_reward_is_never_packed():
    sample = Sample(group="g", index=1, prompt_index=0, epoch=0, prompt="a", seed=1, status="failed")
    with pytest.raises(ValueError, match="sample 1 of group g has no reward"):
        sample.arrays()
    assert sample.messages() == [{"role": "user", "content": "a"}]
