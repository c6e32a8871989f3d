import asyncio
import types

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.inference.answers import Generation
from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.filters import Filter
from miles_hpc.rollout.finished import checked_arrays
from miles_hpc.rollout.generate import (
    GenerateContext,
    PromptTooLong,
    SampleTimeout,
    Services,
    generate_function,
    single_turn,
    two_turn_session,
)
from miles_hpc.rollout.group_run import GroupError, GroupRun
from miles_hpc.rollout.rewards import RewardError, Scorer
from miles_hpc.rollout.sample import GroupSpec, Sample
from miles_hpc.rollout.work_messages import RunGroup
from miles_hpc.session.client import ChatTurn, SessionHandle
from miles_hpc.session.errors import HistoryDiverged, SessionLost
from miles_hpc.session.state import SessionSample
from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.wire.ids import Generation as CellGeneration
from miles_hpc.wire.security import create_secrets, load_http_key

pytestmark = pytest.mark.unit


class Tokenizer:
    def __init__(self):
        self.stop_token_ids = [0]

    def render(self, messages, add_generation_prompt=True):
        return [ord(c) for message in messages for c in message["content"]]

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


class Engine:
    def __init__(self, finish_reason="stop"):
        self.calls = []
        self.finish_reason = finish_reason

    async def generate(self, input_ids, sampling, *, deadline_s):
        self.calls.append((list(input_ids), sampling, deadline_s))
        return Generation(
            token_ids=[120, 121],
            logprobs=[-1.0, -2.0],
            finish_reason=self.finish_reason,
            weight_versions=[(3, 0, 1), (4, 1, 2)],
        )


class Sessions:
    """Loses its first `lost` sessions in the second turn."""

    def __init__(self, lost=0, error=None):
        self.lost = lost
        self.error = error or SessionLost("gone")
        self.created, self.deleted, self.chats = 0, [], []

    async def create(self, *, deadline_s):
        self.created += 1
        return SessionHandle(id=str(self.created), url="http://x", cell="s-00000", generation=CellGeneration(1, 1))

    async def chat(self, session, messages, sampling, *, deadline_s):
        self.chats.append((session.id, [message["content"] for message in messages], sampling.seed))
        if len(messages) > 1 and self.created <= self.lost:
            raise self.error
        text = f"answer {(len(messages) + 1) // 2}"
        return ChatTurn(
            message={"role": "assistant", "content": text},
            finish_reason="stop",
            token_ids=[],
            logprobs=[],
            weight_versions=[],
        )

    async def samples(self, session):
        return SessionSample(
            session_id=session.id,
            token_ids=[1, 2, 3],
            loss_mask=[0, 1, 1],
            logprobs=[0.0, -1.0, -1.0],
            weight_versions=[(3, 1, 3)],
            messages=[],
            turns=[types.SimpleNamespace(finish_reason="length")],
        )

    async def delete(self, session, *, timeout_s):
        self.deleted.append(session.id)


def context(timeout_s=30.0, engine=None, sessions=None, **sections):
    config = msgspec.convert({"seed": 5, **sections}, Config)
    services = Services(config, lambda: {})
    services.__dict__.update(tokenizer=Tokenizer(), engine=engine or Engine(), sessions=sessions or Sessions())
    return GenerateContext(services, timeout_s)


def sample(**changes):
    return Sample(**{"group": "g", "index": 1, "prompt_index": 2, "epoch": 0, "prompt": "ab", "seed": 7, **changes})


def test_a_single_turn_masks_the_prompt_and_places_the_versions_behind_it():
    ctx, item = context(), sample()
    asyncio.run(single_turn(item, ctx))
    assert item.token_ids == [97, 98, 120, 121] and item.loss_mask == [0, 0, 1, 1]
    assert item.logprobs == [0.0, 0.0, -1.0, -2.0] and item.versions == [(3, 2, 3), (4, 3, 4)]
    assert item.response == "xy" and item.status == "completed"
    checked_arrays(item)


def test_a_prompt_is_rendered_once_for_all_samples_of_its_group():
    ctx, rendered = context(), []
    ctx.services.tokenizer.render = lambda messages, add_generation_prompt: rendered.append(messages) or [1, 2]
    first = ctx.prompt_ids(sample())
    first.append(99)  # a list of the caller's own
    assert ctx.prompt_ids(sample(index=2, seed=8)) == [1, 2] and len(rendered) == 1
    ctx.prompt_ids(sample(prompt=[{"role": "user", "content": "ab"}]))
    assert len(rendered) == 2
    for number in range(100):
        ctx.prompt_ids(sample(prompt=f"p{number}"))
    assert len(ctx.services._rendered) == 64
    ctx.prompt_ids(sample())
    assert len(rendered) == 103


def test_sampling_is_as_configured_and_greedy_in_evaluation():
    ctx = context(rollout={"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_response_tokens": 9, "stop": ["!"]})
    asyncio.run(single_turn(sample(), ctx))
    asyncio.run(single_turn(sample(evaluation=True), ctx))
    train, evaluation = (call[1] for call in ctx.services.engine.calls)
    assert (train.temperature, train.top_p, train.top_k, train.max_new_tokens) == (0.7, 0.9, 5, 9)
    assert (train.seed, train.stop, train.stop_token_ids) == (7, ["!"], [0])
    assert (evaluation.temperature, evaluation.top_p, evaluation.top_k) == (0.0, 1.0, -1)


def test_a_request_never_outlives_its_sample():
    ctx = context(timeout_s=3.0, inference={"request_timeout_s": 100.0})
    asyncio.run(single_turn(sample(), ctx))
    assert 0 < ctx.services.engine.calls[0][2] <= 3.0


def test_an_answer_that_was_cut_is_truncated_and_a_long_prompt_is_left_out():
    item = sample()
    asyncio.run(single_turn(item, context(engine=Engine("length"))))
    assert item.status == "truncated"
    with pytest.raises(PromptTooLong, match=r"prompt 2 has 2 tokens, data.max_prompt_tokens = 1"):
        asyncio.run(single_turn(sample(), context(data={"max_prompt_tokens": 1})))


def test_a_two_turn_exchange_is_begun_again_with_the_same_seeds_when_its_session_is_lost():
    sessions = Sessions(lost=1)
    item = sample()
    asyncio.run(two_turn_session(item, context(sessions=sessions, rollout={"second_turn": "sure?"})))
    assert sessions.created == 2 and sessions.deleted == ["1", "2"]
    first, second = sessions.chats[:2], sessions.chats[2:]
    assert [chat[1:] for chat in first] == [chat[1:] for chat in second]
    assert second[1][1] == ["ab", "answer 1", "sure?"] and second[0][2] != second[1][2]
    assert item.response == "answer 2" and item.status == "truncated" and item.token_ids == [1, 2, 3]
    assert item.loss_mask == [0, 1, 1] and item.versions == [(3, 1, 3)]


def test_a_two_turn_exchange_ends_at_the_sample_deadline_and_at_once_when_repeating_cannot_help():
    with pytest.raises(SampleTimeout, match="gone"):
        asyncio.run(two_turn_session(sample(), context(timeout_s=0.25, sessions=Sessions(lost=99))))
    sessions = Sessions(lost=99, error=HistoryDiverged("other history"))
    with pytest.raises(HistoryDiverged):
        asyncio.run(two_turn_session(sample(), context(sessions=sessions)))
    assert sessions.created == 1


def test_an_interrupted_exchange_is_given_up_at_once_and_begins_anew_later():
    class Slow(Sessions):
        async def chat(self, session, messages, sampling, *, deadline_s):
            await asyncio.sleep(60)

    async def main():
        item, ctx = sample(), context(sessions=Slow(), rollout={"partial": True})
        call = asyncio.ensure_future(two_turn_session(item, ctx))
        await asyncio.sleep(0)
        assert not call.done() and ctx.interrupt() == []  # nothing for an engine to abort
        await asyncio.wait_for(call, 5)
        assert item.status == "aborted" and not item.token_ids
        done = sample()
        await two_turn_session(done, context(sessions=Sessions(), rollout={"partial": True}))
        assert done.status == "truncated" and done.token_ids == [1, 2, 3]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_every_nth_prompt_is_an_exchange_but_never_in_evaluation():
    sessions = Sessions()
    ctx = context(sessions=sessions, rollout={"session_every": 3})
    for index in range(6):
        asyncio.run(generate_function("")(sample(prompt_index=index), ctx))
        asyncio.run(generate_function("")(sample(prompt_index=index, evaluation=True), ctx))
    assert sessions.created == 2 and len(ctx.services.engine.calls) == 10


# ------------------------------------------------------------------------------------------ groups
class Rewards:
    def __init__(self, *rewards):
        self.rewards = list(rewards)

    async def score(self, item):
        reward = self.rewards[item.index]
        if isinstance(reward, Exception):
            raise reward
        return reward


def make_group(generate=single_turn, rewards=(0.0, 1.0), ctx=None, filters=()):
    ctx = ctx or context()
    order = RunGroup(
        incarnation=1,
        spec=GroupSpec(id="e00000-i000000004", epoch=0, index=4, prompt_index=2),
        prompt=Prompt(prompt="ab", label="xy", metadata={"k": 1}),
        samples=2,
        weight_version=3,
    )
    return GroupRun(order, ctx.config, ctx.services, generate, Rewards(*rewards), filters)


def run_group(**arguments):
    run = make_group(**arguments)
    return run, RolloutBatch.pack(asyncio.run(asyncio.wait_for(run.run(), 10)))


def failed(match, **arguments):
    with pytest.raises(GroupError, match=f"(?s){match}") as caught:
        run_group(**arguments)
    return caught.value.reason


def test_a_group_is_packed_with_its_samples_in_order():
    _, batch = run_group()
    assert batch.rewards.tolist() == [0.0, 1.0] and batch.sample_index.tolist() == [0, 1]
    assert batch.prompt_index.tolist() == [2, 2] and batch.text("response", 1) == "xy"
    assert batch.lengths.tolist() == [4, 4]


def test_a_failing_sample_cancels_its_siblings_and_names_its_reason():
    cancelled = []

    async def second_fails(item, ctx):
        if item.index:
            raise KeyError("no tool")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(item.index)
            raise

    assert failed("sample 1 of group .*no tool", generate=second_fails) == "generation_failed"
    assert cancelled == [0]


def test_each_kind_of_failure_has_a_reason_of_its_own():
    async def slow(item, ctx):
        ctx.stage("thinking")
        await asyncio.sleep(60)

    async def own_timeout(item, ctx):
        raise asyncio.TimeoutError("a tool was slow")

    async def fill_wrongly(item, ctx):
        await single_turn(item, ctx)
        item.logprobs = item.logprobs[1:]

    async def fill_with_nan(item, ctx):
        await single_turn(item, ctx)
        item.logprobs[3] = float("nan")

    async def fill_nothing(item, ctx):
        return None

    async def fail_softly(item, ctx):
        await single_turn(item, ctx)
        item.status = "aborted"

    short = context(rollout={"sample_timeout_s": 0.05})
    assert failed("at 'thinking'", generate=slow, ctx=short) == "generation_timeout"
    assert failed("a tool was slow", generate=own_timeout) == "generation_failed"
    assert failed("4 tokens but logprobs has 3", generate=fill_wrongly) == "invalid_sample"
    assert failed("not finite at token 3", generate=fill_with_nan) == "invalid_sample"
    assert failed("has no tokens", generate=fill_nothing) == "invalid_sample"
    assert failed("status 'aborted'", generate=fail_softly) == "invalid_sample"
    assert failed("no rule", rewards=(1.0, RewardError("no rule"))) == "reward_failed"
    assert failed("max_prompt_tokens", ctx=context(data={"max_prompt_tokens": 1})) == "prompt_too_long"


def test_what_a_generate_function_says_of_rewards_and_counts_is_judged_too():
    async def own_reward(item, ctx, reward=1.0):
        await single_turn(item, ctx)
        item.reward = reward

    async def two_answers(item, ctx):
        await single_turn(item, ctx)
        item.reward = 0.0
        other = msgspec.structs.replace(item, reward=1.0)
        return [item, other]

    async def odd_count(item, ctx):
        await single_turn(item, ctx)
        item.stats["n"] = None

    _, batch = run_group(generate=own_reward)
    assert batch.rewards.tolist() == [1.0, 1.0]
    for wrong in ("high", float("nan")):
        assert failed("expected a", generate=lambda i, c, w=wrong: own_reward(i, c, w)) == "reward_failed"
    text = "samples of generation 0 have rewards 0.0 and 1.0; they are one answer"
    assert failed(text, generate=two_answers) == "invalid_sample"
    assert failed("expected a number", generate=odd_count) == "invalid_sample"


def test_a_filter_that_raises_fails_the_group_and_not_the_worker(monkeypatch):
    def raises(samples):
        raise KeyError("no such field")

    monkeypatch.setattr("miles_hpc.rollout.filters.load_function", lambda path, key: raises)
    assert failed("Traceback.*no such field", filters=[Filter("m:f")]) == "filter_failed"


def test_half_characters_of_a_response_are_replaced_before_anybody_sees_them():
    async def half(item, ctx):
        await single_turn(item, ctx)
        item.response = "a\ud800"

    assert run_group(generate=half)[1].text("response", 0) == "a\ufffd"


def test_what_a_group_waits_for_is_told_with_the_sample_and_its_stage():
    async def slow(item, ctx):
        if item.index:
            ctx.stage("tool search")
            await asyncio.sleep(60)
        await single_turn(item, ctx)

    async def main():
        run = make_group(generate=slow)
        assert run.stage().stage == "wait"
        task = asyncio.ensure_future(run.run())
        while "search" not in run.stage().stage:  # noqa: ASYNC110 - its own state
            await asyncio.sleep(0)
        assert run.stage().stage == "sample 1: tool search" and run.stage().seconds < 60
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_exact_match_ignores_space_around_texts():
    async def score(response, label):
        scorer = Scorer("exact_match", timeout_s=1)
        return await scorer.score(sample(response=response, label=label))

    assert asyncio.run(score(" 42\n", 42)) == 1.0
    assert asyncio.run(score("4 2", 42)) == 0.0


def test_clients_of_one_s_own_get_the_run_s_key_and_a_word_where_there_is_none(tmp_path):
    create_secrets(tmp_path, 0)
    config = msgspec.convert({}, Config)
    assert Services(config, lambda: {}, tmp_path, 0).api_key == load_http_key(tmp_path, 0)
    assert Services(config, lambda: {}).api_key == "none"
