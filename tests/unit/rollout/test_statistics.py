"""Counts beside the tokens: added up in the worker, told as rates of the step."""

import msgspec
import numpy as np
import pytest

from miles_hpc.inference.answers import Generation
from miles_hpc.rollout.finished import InvalidSample
from miles_hpc.rollout.generate import append_answer
from miles_hpc.rollout.groups import groups_of
from miles_hpc.rollout.sample import Sample
from miles_hpc.rollout.statistics import add_up, group_stats, repetitive, stat_metrics
from miles_hpc.transport.batch import RolloutBatch, SampleArrays

pytestmark = pytest.mark.unit


def sample(index=0, **changes):
    return Sample(**{"group": "g", "index": index, "prompt_index": 0, "epoch": 0, "prompt": "p", "seed": 1, **changes})


def groups(*stats, samples=2):
    rows = [SampleArrays([1], [1], [-1.0], 1.0, sample_index=i) for i in range(samples)] * len(stats)
    found = groups_of(RolloutBatch.pack(rows), [samples] * len(stats))
    for group, own in zip(found, stats, strict=True):
        group.stats = own
    return found


def test_only_a_text_that_says_one_thing_again_and_again_is_repetitive():
    prose = " ".join(f"{number} times {number % 7} makes {number * (number % 7)}, so we go on" for number in range(200))
    assert not repetitive(prose) and not repetitive("") and not repetitive("again " * 50)
    assert repetitive("again " * 400) and repetitive(prose + "again " * 3000)
    assert repetitive("wieder ü\ud800 " * 400)  # half characters do not matter


def test_the_engines_counts_add_up_over_turns_samples_and_groups_and_become_rates():
    one, two = sample(), sample(1)
    for counts in ({"prompt_tokens": 10, "cached_tokens": 0}, {"prompt_tokens": 20, "cached_tokens": 15}):
        append_answer(
            one,
            Generation(token_ids=[1], logprobs=[-1.0], finish_reason="stop", weight_versions=[(1, 0, 1)], stats=counts),
        )
    add_up(two, {"prompt_tokens": 10, "cached_tokens": 5, "tool_s": 3.0, "edits": 4})
    stats = group_stats([one, two])
    assert stats == {"prompt_tokens": 40, "cached_tokens": 20, "tool_s": 3.0, "edits": 4}
    found = stat_metrics(groups(stats, {"prompt_tokens": 40}))
    assert found == {
        "repetitive": 0.0,
        "prefix_cache_hit_rate": 0.25,
        "cached_tokens_mean": 5.0,
        "tool_seconds_mean": 0.75,
        "edits": 1.0,
    }


def test_speculative_decoding_and_sessions_have_rates_of_their_own():
    found = stat_metrics(
        groups(
            {
                "spec_num_correct_drafts": 30,
                "spec_num_proposed_drafts": 40,
                "spec_verify_ct": 10,
                "completion_tokens": 35,
                "tito_sessions": 2,
                "tito_mismatched": 1,
                "tito_mismatch/assistant_text": 1,
            },
            {"tito_sessions": 2, "tito_mismatched": 0},
        )
    )
    assert (found["spec_accept_rate"], found["spec_accept_length"]) == (0.75, 3.5)
    assert (found["tito_mismatch"], found["tito_mismatch/assistant_text"]) == (0.25, 0.25)
    assert "prefix_cache_hit_rate" not in found and "tool_seconds_mean" not in found


def test_categories_and_repetition_are_shares_of_the_samples():
    stats = group_stats([sample(category="format"), sample(1, category="right", response="no " * 400)])
    assert stats == {"category/format": 1, "category/right": 1, "repetitive": 1}
    found = stat_metrics(groups(stats, {"category/right": 2}))
    assert found == {"repetitive": 0.25, "category/format": 0.25, "category/right": 0.75}


def test_a_count_that_is_no_number_is_refused_by_its_samples_index():
    with pytest.raises(InvalidSample, match=r"sample 1 of group g has stats\['n'\] = 'many'; expected a number"):
        group_stats([sample(), sample(1, stats={"n": "many"})])


def test_counts_of_numpy_become_plain_numbers_that_can_be_sent():
    stats = group_stats([sample(stats={"n": np.float64(1.5)}), sample(1, stats={"n": 2})])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) == {"n": 3.5}
