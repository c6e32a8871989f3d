"""What is tokenised of a conversation that goes on: only what comes after the stored tokens."""

import pytest

from miles_hpc.session.continuation import Continuation
from miles_hpc.session.errors import TemplateNotAppendable

pytestmark = pytest.mark.unit

NEW = [{"role": "user", "content": "again"}]
HISTORY = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_prompt_answer_and_suffix_together_are_what_the_template_renders(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    continuation = Continuation(tokenizer)
    answer = [*tokenizer.encode("there"), tokenizer.stop_token_ids[0]]
    ids = continuation.prompt(HISTORY[:1]) + answer + continuation.suffix(answer, NEW)
    assert ids == tokenizer.render([*HISTORY, *NEW])


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_an_answer_cut_by_length_gets_the_closing_token_that_it_did_not_draw(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    continuation = Continuation(tokenizer)
    answer = tokenizer.encode("there")
    ids = continuation.prompt(HISTORY[:1]) + answer + continuation.suffix(answer, NEW)
    assert ids == tokenizer.render([*HISTORY, *NEW])


def test_the_answers_own_tokens_do_not_matter_to_the_suffix(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    continuation = Continuation(tokenizer)
    end = tokenizer.stop_token_ids[0]
    merged = [*tokenizer.encode("hello"), end]
    split = [*(tokenizer.encode(letter)[0] for letter in "hello"), end]
    assert len(merged) != len(split)
    assert continuation.suffix(merged, NEW) == continuation.suffix(split, NEW)


def test_a_template_that_rewrites_history_is_named(make_tokenizer):
    continuation = Continuation(make_tokenizer("forgetful"))
    with pytest.raises(TemplateNotAppendable, match=r"model\.chat_template"):
        continuation.suffix([1], NEW)
