"""A sample that has ended: what cannot be trained on is refused by the sample's index, whatever can be is packed."""

import time

import numpy as np
import pytest

from miles_hpc.rollout.filters import Filter, FilterError
from miles_hpc.rollout.finished import InvalidSample, checked_arrays
from miles_hpc.rollout.sample import Sample, readable
from miles_hpc.transport.batch import RolloutBatch

pytestmark = pytest.mark.unit


def sample(**changes):
    filled = {
        "token_ids": [5, 6, 7],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -1.0, -2.0],
        "versions": [(3, 1, 3)],
        "response": "ab",
        "status": "completed",
        "reward": 1.0,
    }
    base = {"group": "e00000-i000000004", "index": 2, "prompt_index": 9, "epoch": 0, "prompt": "p", "seed": 1}
    return Sample(**{**base, **filled, **changes})


def batch(*samples):
    return RolloutBatch.from_parcel(RolloutBatch.packing_of([checked_arrays(one) for one in samples]).to_bytes())


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"token_ids": []}, "has no tokens"),
        ({"loss_mask": [0, 1]}, "has 3 tokens but loss_mask has 2; expected 3"),
        ({"logprobs": [0.0]}, "has 3 tokens but logprobs has 1; expected 3"),
        ({"extra": {"experts": np.zeros((2, 4), np.int32)}}, "has 3 tokens but experts has 2"),
        ({"token_ids": [5, "6", 7]}, r"token_ids of mixed or wrong types .*; expected whole numbers"),
        ({"token_ids": [5, 6.5, 7]}, r"token_ids of mixed or wrong types \(together float64\)"),
        ({"token_ids": [5, None, 7]}, "token_ids of mixed or wrong types"),
        ({"token_ids": [5, [6], 7]}, "token_ids"),
        ({"token_ids": [5, -6, 7]}, r"token_ids\[1\] = -6; expected 0 to 2147483647"),
        ({"token_ids": [5, 6, 2**40]}, r"token_ids\[2\] = 1099511627776"),
        ({"loss_mask": [0, 1, 2]}, r"loss_mask\[2\] = 2; expected 0 to 1"),
        ({"loss_mask": [0, 0.5, 1]}, "loss_mask of mixed or wrong types"),
        ({"logprobs": [0.0, "x", -1.0]}, "logprobs of mixed or wrong types"),
        ({"logprobs": [0.0, None, -1.0]}, "logprobs of mixed or wrong types"),
        ({"logprobs": [0.0, float("nan"), -1.0]}, "a log-prob that is not finite at token 1"),
        ({"logprobs": [0.0, -1.0, float("-inf")]}, "a log-prob that is not finite at token 2"),
        ({"versions": [(3, 1, 9)]}, r"versions \[\(3, 1, 9\)\]; expected .* of its 3 tokens"),
        ({"versions": [("3", 1, 3)]}, "versions"),
        ({"versions": [(3, 1)]}, "versions"),
        ({"versions": [(2**63, 1, 3)]}, "versions"),
        ({"versions": [(-(2**63) - 1, 1, 3)]}, "versions"),
        ({"versions": [(2**70, 1, 3)]}, "versions"),
        ({"versions": [tuple(np.array([2**63, 1, 3], np.uint64))]}, "versions"),
        ({"versions": [(3, -1, 3)]}, "versions"),
        ({"versions": [(3, 0, 1), (2**63, 1, 3)]}, "versions"),
        ({"versions": np.array([[3, 1, 9]])}, "versions array.*expected .* of its 3 tokens"),
        ({"versions": np.array([3, 1, 3])}, "versions"),
        ({"versions": np.array([[3.5, 1, 3]])}, "versions of mixed or wrong types"),
        ({"versions": None}, "versions of mixed or wrong types"),
        ({"versions": 3}, "versions"),
        ({"status": "aborted"}, "status 'aborted'; expected completed or truncated"),
        ({"extra": {"notes": np.array(["a", "b", "c"])}}, "notes of mixed or wrong types"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named_by_its_index(changes, text):
    with pytest.raises(InvalidSample, match=f"sample 2 of group e00000-i000000004.*{text}"):
        checked_arrays(sample(**changes))


def test_log_probs_of_tokens_that_do_not_count_may_be_anything():
    assert checked_arrays(sample(logprobs=[float("nan"), -1.0, -2.0])).logprobs.tolist() == [0.0, -1.0, -2.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([5, 6, 7]), "loss_mask": np.array([0, 1, 1]), "logprobs": np.array([0.0, -1.0, -2.0])},
        {"token_ids": (5, 6, 7), "loss_mask": (0, 1, 1), "logprobs": (0, -1, -2)},
        {"token_ids": list(np.array([5, 6, 7])), "logprobs": list(np.float32([0, -1, -2]))},
        {"loss_mask": [False, True, True]},
        {"versions": [[3, 1, 3]]},
        {"versions": np.array([[3, 1, 3]])},
        {"versions": ((3, 1, 3),)},
    ],
)
def test_columns_of_other_types_become_the_same_arrays_as_lists(changes):
    found, plain = checked_arrays(sample(**changes)), checked_arrays(sample())
    for name in ("token_ids", "loss_mask", "logprobs"):
        one, other = getattr(found, name), getattr(plain, name)
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert [tuple(span) for span in found.versions] == plain.versions


@pytest.mark.parametrize("versions", [np.empty((0, 3), np.int64), np.array([]), ()])
def test_no_versions_may_be_an_empty_array(versions):
    assert batch(sample(versions=versions)).spans.tolist() == []


def test_a_log_prob_beyond_float32_is_not_finite():
    with pytest.raises(InvalidSample, match="a log-prob that is not finite at token 1"), np.errstate(over="ignore"):
        checked_arrays(sample(logprobs=[0.0, -1e300, -2.0]))


def test_an_empty_response_and_one_without_any_counted_token_are_samples():
    found = batch(sample(token_ids=[5], loss_mask=[0], logprobs=[0.0], versions=[], response=""))
    assert found.lengths.tolist() == [1] and found.loss_mask.sum() == 0 and found.text("response", 0) == ""


def test_a_response_of_128k_tokens_is_packed_in_linear_time():
    def seconds(tokens):
        long = sample(
            token_ids=list(range(tokens)),
            loss_mask=[0] + [1] * (tokens - 1),
            logprobs=[-0.5] * tokens,
            versions=[(3, 1, tokens)],
            response="word " * tokens,
        )
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            found = batch(long)
            best = min(best, time.process_time() - began)
        assert found.lengths.tolist() == [tokens] and found.token_ids[-1] == tokens - 1
        return best

    # Sixteen times the tokens; quadratic would be 256 times the time.
    assert seconds(128 * 1024) < 64 * max(seconds(8 * 1024), 0.001)


@pytest.mark.parametrize(
    "text, kept", [("plain", "plain"), ("ünï", "ünï"), ("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "😀"), ("", "")]
)
def test_half_characters_become_readable_and_everything_else_stays(text, kept):
    assert readable(text) == kept
    assert batch(sample(response=readable(text))).text("response", 0) == kept


def test_bytes_of_a_text_that_do_not_decode_are_shown_as_such():
    arrays = checked_arrays(sample())
    arrays = type(arrays)(
        **{name: getattr(arrays, name) for name in ("token_ids", "loss_mask", "logprobs", "reward")},
        texts={"response": b"ok \xff\xfe"},
    )
    found = RolloutBatch.from_parcel(RolloutBatch.packing_of([arrays]).to_bytes())
    assert found.text("response", 0) == "ok \ufffd\ufffd"


def raises(samples):
    raise KeyError("no such field")


def triple(samples):
    return True, "a", "b"


@pytest.mark.parametrize("name, text", [("raises", "no such field"), ("triple", "too many values")])
def test_a_filter_that_raises_or_answers_otherwise_says_so_with_its_traceback(monkeypatch, name, text):
    monkeypatch.setattr("miles_hpc.rollout.filters.load_function", lambda path, key: globals()[name])
    with pytest.raises(FilterError, match=f"(?s)rollout.filters: 'm:{name}'.*Traceback.*{text}"):
        Filter(f"m:{name}").refuses([sample()])


def test_built_in_filters_refuse_by_name():
    assert Filter("no_aborted").refuses([sample(status="aborted")]) == "no_aborted"
    assert Filter("no_aborted").refuses([sample()]) == ""


def test_a_refusal_without_a_word_refuses_too(monkeypatch):
    monkeypatch.setattr("miles_hpc.rollout.filters.load_function", lambda path, key: lambda samples: (False, ""))
    assert Filter("m:f").refuses([sample()]) == "unnamed"
