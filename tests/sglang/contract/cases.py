"""What we rely on of an engine, as tests over a fixture `engine` (a Subject). They run against the real SGLang in the
sglang layer and against the embedded engine in the process layer; what differs on purpose stands in the layers' own
files. New weights have a file of their own, and so have streams; those take this one as `engine_contract`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.inference.needs import NEEDED_CALLS
from miles_hpc.rollout.finished import checked_arrays
from miles_hpc.rollout.generate import GenerateContext, Services, single_turn
from miles_hpc.rollout.sample import PartialSample, Sample
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs

PROMPT = [10, 20, 30, 40, 50]
LONG = 600
"""Tokens of a request that is still running when something happens to it."""


PARTIAL = 300
"""Tokens of an answer that is interrupted and goes on."""


class Subject:
    """An engine under test: its address, its key, and two model directories of one shape."""

    def __init__(self, url: str, models: list[Path], key: str = "") -> None:
        self.url, self.models, self.key = url, models, key
        self.expected: dict[int, list[int]] = {}
        """Model -> its greedy tokens after PROMPT."""

    def run(self, body: Callable[[Talk], Awaitable[Any]], timeout_s: float = 120.0) -> Any:
        """Run a coroutine function with a client; afterwards the engine is continued, empty, on model 0 as `v0`."""

        async def main() -> Any:
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
                talk = Talk(http, self)
                await talk.reset()
                if not self.expected:
                    for index in (1, 0):
                        await talk.load(index, f"v{index}")
                        self.expected[index] = (await talk.generate(PROMPT, 24))["output_ids"]
                try:
                    return await asyncio.wait_for(body(talk), timeout_s)
                finally:
                    await talk.reset()

        return asyncio.run(main())


class Talk:
    """JSON calls to one engine."""

    def __init__(self, http: aiohttp.ClientSession, subject: Subject) -> None:
        self.http, self.subject = http, subject

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.http.post(self.subject.url + path, json={} if body is None else body) as answer:
            text = await answer.text()
            assert answer.status == status, f"{path}: {answer.status} {text[:500]}"
            return json.loads(text) if answer.content_type == "application/json" else text

    async def get(self, path: str, *, status: int = 200) -> Any:
        async with self.http.get(self.subject.url + path) as answer:
            text = await answer.text()
            assert answer.status == status, f"{path}: {answer.status} {text[:500]}"
            return json.loads(text) if answer.content_type == "application/json" else text

    def body(self, ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
        return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}

    async def generate(self, ids: list[int], tokens: int, **more: Any) -> Any:
        return await self.post("/generate", self.body(ids, tokens, **more))

    def begin(self, ids: list[int] = PROMPT, tokens: int = LONG, **more: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.generate(ids, tokens, **more))

    async def running(self, count: int = 1, tokens: int = 30) -> None:
        """Until that many requests run and hold that many tokens."""
        await self.until(lambda load: load["num_running_reqs"] >= count and load["num_used_tokens"] >= tokens)

    async def load_now(self) -> dict[str, Any]:
        return (await self.get("/v1/loads"))["loads"][0]

    async def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 30.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while not condition(load := await self.load_now()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s, last seen {load}"
            await asyncio.sleep(0.01)
        return load

    async def idle(self) -> None:
        """Until nothing runs or waits: an aborted request is answered before it has left, which forbids a flush."""
        await self.until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)

    async def load(self, index: int, version: str | None, *, status: int = 200, **more: Any) -> Any:
        version_part = {} if version is None else {"weight_version": version}
        body = {"model_path": str(self.subject.models[index]), **version_part, **more}
        return await self.post("/update_weights_from_disk", body, status=status)

    async def version(self) -> str:
        return str((await self.get("/model_info"))["weight_version"])

    async def reset(self) -> None:
        await self.post("/continue_generation")
        await self.post("/abort_request", {"abort_all": True})
        await self.idle()
        await self.load(0, "v0")


def spans(answer: Any) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]


# --------------------------------------------------------------------------------------------------- generation
def test_every_call_that_is_needed_of_an_engine_is_on_its_openapi_page(engine):
    async def body(talk):
        page = await talk.get("/openapi.json")
        assert [call for call in NEEDED_CALLS if call not in page["paths"]] == []

    engine.run(body)


def test_ids_log_probs_and_spans_of_an_answer_fit_together(engine):
    async def body(talk):
        answer = await talk.generate(PROMPT, 16)
        ids = answer["output_ids"]
        assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == ids
        assert all(logprob <= 0 for logprob, _, _ in answer["meta_info"]["output_token_logprobs"])
        assert spans(answer) == [("v0", 0, len(ids))]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
        assert (answer["meta_info"]["prompt_tokens"], answer["meta_info"]["completion_tokens"]) == (len(PROMPT), 16)

    engine.run(body)


def test_greedy_tokens_are_equal_alone_among_others_and_in_a_batch(engine):
    async def body(talk):
        prompts = [[*PROMPT, extra] for extra in range(60, 68)]
        alone = [(await talk.generate(ids, 24))["output_ids"] for ids in prompts]
        together = await asyncio.gather(*(talk.generate(ids, 24) for ids in prompts))
        assert [one["output_ids"] for one in together] == alone
        batch = await talk.post("/generate", talk.body(prompts, 24))
        assert [one["output_ids"] for one in batch] == alone

    engine.run(body)


def test_a_drawn_stop_token_is_the_last_output_id_and_is_named(engine):
    async def body(talk):
        stop = engine.expected[0][3]
        answer = await talk.generate(PROMPT, 24, sampling={"stop_token_ids": [stop], "ignore_eos": False})
        first = engine.expected[0].index(stop)
        assert answer["output_ids"] == engine.expected[0][: first + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}

    engine.run(body)


def test_what_is_wrong_with_a_request_is_a_400_with_a_message(engine):
    async def body(talk):
        for bad in ({"sampling_params": {}}, talk.body(PROMPT, 5000), talk.body([], 5)):
            answer = await talk.post("/generate", bad, status=400)
            assert answer["error"]["message"]
        await talk.generate(PROMPT, 4)

    engine.run(body)


def test_a_request_is_aborted_by_its_rid_and_answers_200_with_what_it_has(engine):
    async def body(talk):
        aborted, other = talk.begin(rid="one"), talk.begin([*PROMPT, 9], rid="two")
        await talk.running(2)
        await talk.post("/abort_request", {"rid": "one"})
        answer = await aborted
        assert answer["meta_info"]["id"] == "one"
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < LONG
        await talk.post("/abort_request", {"abort_all": True})
        assert (await other)["meta_info"]["finish_reason"]["type"] == "abort"

    engine.run(body)


def test_an_interrupted_sample_keeps_its_tokens_and_goes_on_with_new_weights_and_the_old_ones_masked(engine):
    """Partial rollouts: abort, partial sample, resume, with our own client and generate function."""

    async def body(talk):
        await talk.load(0, "1")
        context = generate_context(engine, talk)
        first = Sample(group="g", index=0, prompt_index=0, epoch=0, prompt="3 + 4", seed=1)
        call = asyncio.ensure_future(single_turn(first, context))
        await talk.running()
        await context.services.abort(context.interrupt())
        await asyncio.wait_for(call, 30)
        prompt = len(context.prompt_ids(first))
        kept = len(first.token_ids)
        assert first.status == "aborted" and prompt < kept < prompt + PARTIAL
        assert first.versions == [(1, prompt, kept)] and min(first.logprobs[prompt:]) < 0 == max(
            first.logprobs[:prompt]
        )
        assert sum(first.loss_mask) == kept - prompt
        # Later, with the weights of another step, as it would come out of a commit.
        await talk.load(1, "2")
        saved = msgspec.json.decode(msgspec.json.encode(PartialSample.of(first)), type=PartialSample)
        second = Sample(group="g", index=0, prompt_index=0, epoch=0, prompt="3 + 4", seed=1)
        saved.restore(second, mask=True)
        await asyncio.wait_for(single_turn(second, generate_context(engine, talk)), 90)
        assert second.token_ids[:kept] == first.token_ids and second.logprobs[:kept] == first.logprobs
        end = len(second.token_ids)
        assert second.versions == [(1, prompt, kept), (2, kept, end)]
        assert second.loss_mask == [0] * kept + [1] * (end - kept) and second.status in ("completed", "truncated")
        # Nothing was drawn twice, and what was drawn last comes from the new weights over the old tokens.
        assert kept < end <= prompt + PARTIAL
        again = await talk.generate(second.token_ids[:kept], 4)
        assert again["output_ids"] == second.token_ids[kept : kept + 4]
        assert checked_arrays(second).logprobs[kept:].min() < 0

    engine.run(body)


def generate_context(engine: Any, talk: Any) -> GenerateContext:
    """Our generate functions' view of one engine, which stands in for the router too."""
    config = msgspec.convert(
        {
            "model": {"path": str(engine.models[0])},
            "rollout": {"partial": True, "max_response_tokens": PARTIAL, "temperature": 0},
        },
        Config,
    )
    cell = CellAddrs(
        cell="engine-policy-0-00000",
        generation=Generation(1, 1),
        node="node-00000",
        ready=True,
        workers=[{"http": HostAndPort.parse(engine.url.removeprefix("http://"))}],
    )
    services = Services(config, lambda: {"engine-policy-0": [cell], "router-policy": [cell]})
    services.__dict__["http"] = talk.http
    return GenerateContext(services, 100.0)


def test_a_client_that_leaves_frees_its_place(engine):
    async def body(talk):
        leaving = talk.begin()
        await talk.running()
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await talk.until(lambda load: load["num_running_reqs"] == 0)

    engine.run(body)


def test_chat_takes_exact_tokens_and_gives_them(engine):
    async def body(talk):
        request = {
            "model": "m",
            "messages": [{"role": "user", "content": "not used"}],
            "input_ids": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
            "return_prompt_token_ids": True,
            "return_meta_info": True,
        }
        choice = (await talk.post("/v1/chat/completions", request))["choices"][0]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["response_token_ids"] == engine.expected[0][:12]
        assert choice["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 12}]
        assert len(choice["logprobs"]["content"]) == 12

    engine.run(body)


# ------------------------------------------------------------------------------------------------ pause and health
def test_a_paused_engine_is_healthy_not_ready_and_new_requests_wait(engine):
    async def body(talk):
        await talk.post("/pause_generation", {"mode": "retract"})
        before = time.monotonic()
        await talk.get("/health")
        await talk.get("/model_info")
        await talk.get("/server_info")
        assert time.monotonic() - before < 10
        await talk.get("/ready", status=503)
        waiting = talk.begin(PROMPT, 8)
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await talk.post("/continue_generation")
        assert (await waiting)["output_ids"] == engine.expected[0][:8]
        await talk.get("/ready")

    engine.run(body)


def test_the_time_stamp_of_the_loads_moves_unless_paused(engine):
    async def body(talk):
        first = (await talk.load_now())["timestamp"]
        await talk.until(lambda load: load["timestamp"] > first, 10)
        busy = talk.begin()
        await talk.running()
        first = (await talk.load_now())["timestamp"]
        await talk.until(lambda load: load["timestamp"] > first, 10)
        await talk.post("/pause_generation", {"mode": "in_place"})
        await asyncio.sleep(1.5)  # a look that was on its way
        first = (await talk.load_now())["timestamp"]
        await asyncio.sleep(3)
        assert (await talk.load_now())["timestamp"] == first
        await talk.post("/abort_request", {"abort_all": True})
        await talk.post("/continue_generation")
        await busy

    engine.run(body)


def test_metrics_name_running_requests_and_generated_tokens(engine):
    async def body(talk):
        await talk.generate(PROMPT, 8)
        text = await talk.get("/metrics")
        assert "sglang:num_running_reqs{" in text and "sglang:generation_tokens_total{" in text

    engine.run(body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_where_they_were(engine, mode):
    async def body(talk):
        whole = (await talk.generate(PROMPT, 200))["output_ids"]
        one = talk.begin(PROMPT, 200)
        await talk.running()
        await talk.post("/pause_generation", {"mode": mode})
        await asyncio.sleep(0.3)
        assert not one.done()
        await talk.post("/continue_generation")
        answer = await one
        assert answer["output_ids"] == whole
        assert answer["meta_info"]["finish_reason"]["type"] == "length"

    engine.run(body)


def test_a_pause_in_mode_abort_ends_what_runs(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "abort"})
        assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"

    engine.run(body)
