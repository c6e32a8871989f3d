"""The contract of streamed answers over the fixtures `incremental` and `cumulative`, two Subjects of one model; see
`cases`. Both forms are read by our own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from engine_contract import LONG, PROMPT

from miles_hpc.inference.generate import GenerateClient, SamplingParams

FORMS = ["incremental", "cumulative"]
VOCABULARY = 384


async def events_of(talk: Any, tokens: int) -> list[Any]:
    """The events of a streamed answer, without its `[DONE]`."""
    body = {**talk.body(PROMPT, tokens), "stream": True}
    async with talk.http.post(talk.subject.url + "/generate", json=body) as answer:
        assert answer.content_type == "text/event-stream"
        text = (await answer.read()).decode()
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def ours(talk: Any, tokens: int = LONG) -> asyncio.Task[Any]:
    """An answer that our client reads; an aborted one too."""
    client = GenerateClient(lambda: talk.subject.url, talk.http, VOCABULARY)
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    drawn = client.generate(PROMPT, sampling, rid="ours", deadline_s=90, take_aborted=lambda: True)
    return asyncio.ensure_future(drawn)


async def begun(talk: Any) -> asyncio.Task[Any]:
    """Such an answer that has some tokens. The one before it may be counted for a while after it was answered."""
    await talk.idle()
    call = ours(talk)
    await talk.running()
    return call


def is_begin_of(part: Any, whole: Any) -> None:
    """An aborted answer holds the first tokens of the whole one, each with its own log-prob."""
    count = len(part.token_ids)
    assert part.finish_reason == "abort" and 0 < count < LONG
    assert part.token_ids == whole["output_ids"][:count] and whole["text"].startswith(part.text.rstrip("\ufffd"))
    rows = whole["meta_info"]["output_token_logprobs"][:count]
    assert part.logprobs == pytest.approx([logprob for logprob, _, _ in rows], abs=1e-4)
    assert part.weight_versions == [(1, 0, count)]


def test_events_hold_what_is_new_and_count_the_whole(incremental):
    async def body(talk):
        whole = await talk.generate(PROMPT, LONG)
        events = await events_of(talk, LONG)
        ids: list[int] = []
        for event in events:
            ids += event["output_ids"]
            meta = event["meta_info"]
            assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == len(ids)
            assert (meta["finish_reason"] is None) is (event is not events[-1])
        assert ids == whole["output_ids"]
        assert "".join(event["text"] for event in events) == whole["text"]
        assert events[-1]["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": LONG}]
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": LONG}

    incremental.run(body)


def test_events_hold_the_answer_so_far(cumulative):
    async def body(talk):
        whole = await talk.generate(PROMPT, LONG)
        *events, last = await events_of(talk, LONG)
        for event in events:
            ids, meta = event["output_ids"], event["meta_info"]
            assert ids == whole["output_ids"][: len(ids)] and meta["finish_reason"] is None
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == len(ids)
        assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])
        assert len(last["meta_info"]["output_token_logprobs"]) == LONG
        assert last["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": LONG}]

    cumulative.run(body)


@pytest.mark.parametrize("form", FORMS)
def test_our_client_reads_the_answer_that_comes_whole(form, request):
    async def body(talk):
        await talk.load(0, "1")
        whole = await talk.generate(PROMPT, LONG)
        found = await ours(talk)
        assert (found.token_ids, found.text, found.finish_reason) == (whole["output_ids"], whole["text"], "length")
        rows = whole["meta_info"]["output_token_logprobs"]
        assert found.logprobs == pytest.approx([logprob for logprob, _, _ in rows], abs=1e-4)
        assert found.weight_versions == [(1, 0, LONG)]
        assert found.stats["completion_tokens"] == LONG

    request.getfixturevalue(form).run(body)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_drawn_until_an_abort_is_kept(form, request):
    async def body(talk):
        await talk.load(0, "1")
        whole = await talk.generate(PROMPT, LONG)
        call = await begun(talk)
        await talk.post("/abort_request", {"rid": "ours"})
        is_begin_of(await call, whole)

    request.getfixturevalue(form).run(body)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_drawn_until_a_retraction_is_kept_when_the_request_is_aborted_while_it_waits(form, request):
    async def body(talk):
        await talk.load(0, "1")
        whole = await talk.generate(PROMPT, LONG)
        call = await begun(talk)
        await talk.post("/pause_generation", {"mode": "retract"})
        await talk.post("/abort_request", {"rid": "ours"})
        is_begin_of(await call, whole)
        await talk.post("/continue_generation")

    request.getfixturevalue(form).run(body)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_two_versions_keep_their_places(form, request):
    async def body(talk):
        await talk.load(0, "1")
        whole = await talk.generate(PROMPT, LONG)
        call = await begun(talk)
        await talk.post("/pause_generation", {"mode": "retract"})
        await talk.load(1, "2")
        await talk.post("/continue_generation")
        found = await call
        (old, start, swap), (new, again, end) = found.weight_versions
        assert (old, start, new) == (1, 0, 2) and 0 < swap == again < end == len(found.token_ids)
        assert found.token_ids[:swap] == whole["output_ids"][:swap]
        after = await talk.generate([*PROMPT, *found.token_ids[:swap]], 4)
        assert after["output_ids"] == found.token_ids[swap : swap + 4]

    request.getfixturevalue(form).run(body)
