"""A session's tokens against its messages: each kind of drift is told apart, and what is none is none."""

import pytest

from miles_hpc.session.continuation import Continuation
from miles_hpc.session.mismatch import mismatches

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "hello there"}
NEXT = {"role": "user", "content": "hello"}


def conversation(tokenizer, answers, closed=True):
    """Tokens, mask and messages as a session has them."""
    continuation, stop = Continuation(tokenizer), tokenizer.encode("<|im_end|>")
    ids, mask, messages, drawn = [], [], [], []
    for number, answer in enumerate(answers):
        new = [USER if number == 0 else NEXT]
        added = continuation.suffix(drawn, new) if number else continuation.prompt(new)
        drawn = tokenizer.encode(answer) + (stop if closed or number + 1 < len(answers) else [])
        ids, mask = ids + added + drawn, mask + [0] * len(added) + [1] * len(drawn)
        messages += [*new, {"role": "assistant", "content": answer}]
    return ids, mask, messages


@pytest.mark.parametrize("template", ["chatml", "plain"])
@pytest.mark.parametrize("closed", [True, False])
def test_tokens_of_a_session_are_those_of_its_messages_also_when_the_last_answer_was_cut(
    make_tokenizer, template, closed
):
    tokenizer = make_tokenizer(template)
    ids, mask, messages = conversation(tokenizer, ["hello", "there"], closed)
    assert mismatches(tokenizer, ids, mask, messages) == []


def test_each_kind_of_drift_has_its_name(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    ids, mask, messages = conversation(tokenizer, ["hello", "there"])
    end = tokenizer.encode("<|im_end|>")[0]

    def found(new_ids=ids, new_mask=mask, new_messages=messages):
        return mismatches(tokenizer, new_ids, new_mask, new_messages)

    assert found(new_ids=[end, *ids], new_mask=[0, *mask]) == ["special_token_count"]
    swapped = [tokenizer.encode("<|user|>")[0] if place == ids.index(end) else token for place, token in enumerate(ids)]
    assert found(new_ids=swapped) == ["special_token_type"]
    assert found(new_messages=[{"role": "user", "content": "other"}, *messages[1:]]) == ["non_assistant_text"]
    assert found(new_messages=[*messages[:-1], {"role": "assistant", "content": "hello"}]) == ["assistant_text"]
    both = [{"role": "user", "content": "other"}, *messages[1:-1], {"role": "assistant", "content": "hello"}]
    assert found(new_messages=both) == ["non_assistant_text", "assistant_text"]
