import asyncio
import sys
import types

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.inference.generate import Generation
from miles_hpc.rollout.filters import Filter
from miles_hpc.rollout.generate import GenerateContext, Services, generate_function, single_turn
from miles_hpc.rollout.multi_turn import multi_turn, parse_tool_calls
from miles_hpc.rollout.sample import PartialSample, Sample

pytestmark = pytest.mark.unit


class Tokenizer:
    """A letter is a token; a turn ends with `.`; a prompt is text in brackets."""

    stop_token_ids = (ord("."),)
    model_dir = "here"

    def render_text(self, messages, add_generation_prompt=True, *, tools=None):
        text = "".join(
            m["content"] + "." if m["role"] == "assistant" else f"[{m['role'][0]}:{m['content']}]" for m in messages
        )
        return text + (">" if add_generation_prompt else "")

    def render(self, messages, add_generation_prompt=True, *, tools=None):
        return self.encode(self.render_text(messages, add_generation_prompt, tools=tools))

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids).rstrip(".")


class Engine:
    def __init__(self, *answers, finish="stop"):
        self.answers = list(answers)
        self.prompts = []
        self.finish = finish

    async def generate(self, input_ids, sampling, *, deadline_s, **more):
        self.prompts.append(("".join(map(chr, input_ids)), sampling.max_new_tokens))
        ids = [ord(c) for c in self.answers.pop(0)]
        return Generation(
            token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=self.finish, weight_versions=[(3, 0, len(ids))]
        )


def context(engine, **rollout):
    services = Services(msgspec.convert({"rollout": rollout}, Config), lambda: {})
    services.__dict__.update(tokenizer=Tokenizer(), engine=engine)
    return GenerateContext(services, 30.0)


def sample(**changes):
    return Sample(**{"group": "g", "index": 1, "prompt_index": 2, "epoch": 0, "prompt": "ab", "seed": 7, **changes})


@pytest.fixture
def tools(monkeypatch):
    module = types.ModuleType("test_tools")
    calls = []

    async def run(name, arguments, item):
        calls.append((name, arguments))
        if name == "slow":
            await asyncio.sleep(60)
        if name == "broken":
            raise KeyError("no such page")
        return f"{name} says {arguments.get('x')}"

    module.run = run
    monkeypatch.setitem(sys.modules, "test_tools", module)
    return calls


def call(name, arguments='{"x": 1}'):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>.'


def test_turns_go_on_while_tools_are_called_and_only_the_policys_tokens_count(tools):
    engine = Engine(call("add"), "done.")
    item = sample()
    asyncio.run(multi_turn(item, context(engine, tools="test_tools:run")))
    assert tools == [("add", {"x": 1})]
    text = "".join(map(chr, item.token_ids))
    assert text == f"[u:ab]>{call('add')}[t:add says 1]>done."
    counted = "".join(c for c, counts in zip(text, item.loss_mask, strict=True) if counts)
    assert counted == call("add") + "done." and item.response == "done" and item.status == "completed"
    assert engine.prompts[1][0] == text[: -len("done.")]
    for version, start, end in item.versions:
        assert version == 3 and all(item.loss_mask[start:end])
    assert sum(end - start for _, start, end in item.versions) == sum(item.loss_mask)


def test_what_goes_wrong_in_a_tool_is_told_to_the_policy(tools):
    engine = Engine(call("broken"), call("slow"), "<tool_call>{not json</tool_call>.", "done.")
    item = sample()
    asyncio.run(multi_turn(item, context(engine, tools="test_tools:run", tool_timeout_s=0.05)))
    text = "".join(map(chr, item.token_ids))
    assert "error: KeyError: 'no such page'" in text and "error: slow did not answer within 0.05 s" in text
    assert "error: the call is not readable" in text and item.response == "done"


def test_turns_end_at_their_limit_and_when_an_answer_is_cut_off(tools):
    item = sample()
    asyncio.run(multi_turn(item, context(Engine(call("a"), call("b")), tools="test_tools:run", max_turns=2)))
    assert len(tools) == 1 and item.status == "completed"
    asyncio.run(multi_turn(item, context(Engine(call("a"), finish="length"), tools="test_tools:run")))
    assert len(tools) == 1 and item.status == "truncated"


def interrupted(item, tokens, mask):
    """What is kept of a finished sample that had been interrupted after so many tokens."""
    kept = PartialSample(
        index=1,
        status="aborted",
        token_ids=item.token_ids[:tokens],
        loss_mask=item.loss_mask[:tokens],
        logprobs=item.logprobs[:tokens],
        versions=[(version, start, min(end, tokens)) for version, start, end in item.versions if start < tokens],
    )
    kept.restore(fresh := sample(), mask=mask)
    return fresh


@pytest.mark.parametrize("stateful, counted", [(False, 3.0), (True, 2.0)])
def test_tool_calls_of_the_turns_that_are_kept_stay_counted(tools, stateful, counted):
    """The first two were made before the interruption; with tools that keep something all is done anew."""
    sys.modules["test_tools"].run.stateful = stateful
    before = sample()
    asyncio.run(multi_turn(before, context(Engine(call("a"), call("b"), "x", finish="stop"), tools="test_tools:run")))
    before.status = "aborted"
    PartialSample.of(before).restore(item := sample(), mask=False)
    answers = (call("a"), call("b"), "done.") if stateful else (call("c"), "done.")
    asyncio.run(multi_turn(item, context(Engine(*answers), tools="test_tools:run")))
    assert item.response.endswith("done") and item.stats["tool_calls"] == counted


@pytest.mark.parametrize("mask", [False, True])
def test_turns_go_on_from_wherever_they_were_interrupted(tools, mask):
    answers = [call("add"), call("sub"), "done."]
    whole = sample()
    asyncio.run(multi_turn(whole, context(Engine(*answers), tools="test_tools:run", max_response_tokens=200)))
    ends = [end for _, _, end in whole.versions]
    starts = [start for _, start, _ in whole.versions]
    for tokens in range(starts[0] + 1, ends[-1]):
        # An answer that had ended was followed by its tools; what they said is kept, or the answer is not over.
        behind = [end for end in ends if end <= tokens]
        if behind and tokens < starts[len(behind)]:
            continue
        turn = len(behind)
        begun = tokens - starts[turn]
        engine = Engine(answers[turn][begun:], *answers[turn + 1 :])
        tools.clear()
        item = interrupted(whole, tokens, mask)
        asyncio.run(multi_turn(item, context(engine, tools="test_tools:run", max_response_tokens=200)))
        assert item.token_ids == whole.token_ids and item.response == "done" and item.status == "completed"
        assert [name for name, _ in tools] == ["add", "sub"][turn:]
        assert engine.prompts[0] == ("".join(map(chr, whole.token_ids[:tokens])), 200 - begun)
        assert item.loss_mask == [0] * tokens * mask + whole.loss_mask[tokens * mask :]
        assert sum(end - start for _, start, end in item.versions) == sum(whole.loss_mask)


def test_turns_begin_anew_when_the_tools_keep_something_or_the_prompt_is_another(tools):
    answers = [call("add"), "done."]
    whole = sample()
    asyncio.run(multi_turn(whole, context(Engine(*answers), tools="test_tools:run")))
    sys.modules["test_tools"].run.stateful = True
    for prompt in ("ab", "abc"):
        engine = Engine(*answers)
        item = interrupted(whole, len(whole.token_ids) - 1, False)
        item.prompt = prompt
        asyncio.run(multi_turn(item, context(engine, tools="test_tools:run")))
        assert engine.prompts[0][0] == f"[u:{prompt}]>" and item.response == "done"
        assert len(item.token_ids) == len(whole.token_ids) + len(prompt) - 2
        sys.modules["test_tools"].run.stateful = False


def test_calls_are_read_in_order_and_arguments_may_be_a_text():
    first, second = parse_tool_calls(call("a", '"{\\"y\\": 2}"') + "and" + call("b"))
    assert (first.name, first.arguments, second.name) == ("a", {"y": 2}, "b")
    assert parse_tool_calls("no call") == []


def test_generate_functions_are_found_by_name():
    assert generate_function("multi_turn") is multi_turn and generate_function("single_turn") is single_turn


def test_a_single_turn_goes_on_from_the_tokens_of_an_interruption():
    engine = Engine("cd.")
    item = sample()
    old = [ord(c) for c in "[u:ab]>xy"]
    PartialSample(
        index=1, status="aborted", token_ids=old, loss_mask=[0] * 7 + [1] * 2, logprobs=[-0.5] * 9, versions=[(2, 7, 9)]
    ).restore(item, mask=True)
    asyncio.run(single_turn(item, context(engine, max_response_tokens=10)))
    assert engine.prompts == [("[u:ab]>xy", 8)]
    assert item.response == "xycd" and item.loss_mask == [0] * 9 + [1] * 3
    assert item.versions == [(2, 7, 9), (3, 9, 12)] and item.status == "completed"


def test_an_interrupted_request_ends_with_the_tokens_drawn_until_then():
    engine = Engine("x", finish="abort")
    item, ctx = sample(), context(engine, partial=True)
    asyncio.run(single_turn(item, ctx))
    assert item.status == "aborted" and item.response == "x"


def test_filters_give_a_word_to_count_by():
    equal = [sample(reward=1.0), sample(reward=1.0)]
    assert Filter("nonzero_std").refuses(equal) == "zero_std_1"
    assert Filter("nonzero_std").refuses([sample(reward=1.0), sample(reward=0.0)]) == ""
    assert Filter("no_truncated").refuses([sample(status="truncated")]) == "no_truncated"
