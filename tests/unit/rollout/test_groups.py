import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.config.schema import TrainConfig
from miles_hpc.rollout.convert import TrainBatch, TrainData
from miles_hpc.rollout.groups import Gathered, faults, groups_of
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.columns import SchemaError

pytestmark = pytest.mark.unit


def sample(tokens, index=0, reward=1.0, versions=(7,), logprob=-1.0):
    return SampleArrays(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        logprobs=np.full(tokens, logprob, np.float32),
        reward=reward,
        versions=[(version, 0, tokens) for version in versions],
        sample_index=index,
        texts={"response": "x" * (tokens % 7)},
    )


# Tokens of each sample of each group; some groups are too large to be copied together with others.
shapes = st.lists(st.lists(st.sampled_from([1, 2, 3, 17, 5000]), min_size=1, max_size=3), min_size=1, max_size=8)


def made_of(shapes):
    return [
        RolloutBatch.pack([sample(tokens, i, float(g), (g % 3, 9)) for i, tokens in enumerate(group)])
        for g, group in enumerate(shapes)
    ]


@settings(deadline=None, max_examples=60)
@given(shapes, st.data())
def test_groups_that_share_parcels_are_the_same_as_groups_alone(shapes, data):
    alone = made_of(shapes)
    order = data.draw(st.permutations(range(len(alone))))
    cut = data.draw(st.integers(0, len(alone)))
    parcels = [part for part in (alone[:cut], alone[cut:]) if part]
    groups = [
        group
        for part in parcels
        for group in groups_of(
            RolloutBatch.from_parcel(RolloutBatch.concat(part).packing().to_bytes()), [len(one) for one in part]
        )
    ]
    gathered = Gathered.of([groups[place] for place in order])
    apart = Gathered.alone([alone[place] for place in order])
    assert gathered.flat_sizes == apart.flat_sizes and len(gathered) == len(alone)
    assert gathered.digests() == apart.digests() and gathered.versions() == apart.versions()
    shards = [
        TrainData(one, rollout_id=0, weight_version=9, train=TrainConfig(uneven="pad")).shard(0, 2).to_bytes()
        for one in (gathered, apart)
    ]
    assert bytes(shards[0]) == bytes(shards[1])
    assert TrainBatch.from_parcel(shards[0]).oldest_version.max() <= 9


def test_a_digest_is_that_of_the_groups_own_columns():
    batch = RolloutBatch.pack([sample(3, 0), sample(2, 1)])
    whole = b"".join(column.tobytes() for column in (batch.offsets, batch.token_ids, batch.loss_mask, batch.rewards))
    second = groups_of(RolloutBatch.concat([batch, batch]), [2, 2])[1]
    assert Gathered.of([second]).digests() == [hashlib.sha256(whole).hexdigest()]


def test_each_group_knows_its_oldest_version():
    batch = RolloutBatch.pack([sample(2, versions=(5, 4)), sample(2, versions=()), sample(2, versions=(6,))])
    assert [group.oldest for group in groups_of(batch, [1, 1, 1])] == [4, -1, 6]
    assert groups_of(batch, [2, 1])[0].oldest == 4


def test_groups_that_cannot_be_trained_on_are_named_with_the_sample():
    batch = RolloutBatch.pack(
        [
            sample(2, 0),
            sample(2, 1),
            sample(2, 0),
            sample(2, 0, reward=float("nan")),
            sample(2, 0),
            sample(2, 1, logprob=float("inf")),
        ]
    )
    groups = groups_of(batch, [2, 1, 1, 2])
    assert faults(batch, groups, [2, 2, 1, 2]) == {
        1: "has 1 samples; expected 2",
        2: "sample 0 has a reward that is not finite",
        3: "sample 1 has a log-prob that is not finite",
    }


@pytest.mark.parametrize("sizes", [[1], [2, 2], [2, 0, 1], []])
def test_sizes_that_do_not_make_up_the_batch_are_refused(sizes):
    with pytest.raises(SchemaError, match="do not make up a batch of 3"):
        groups_of(RolloutBatch.pack([sample(1)] * 3), sizes)
