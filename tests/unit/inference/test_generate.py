"""A request through the router: refused at once when wrong, drawn again when lost, never half an answer."""

import asyncio
import time

import pytest

from miles_hpc.inference.generate import (
    EngineFailed,
    GenerateClient,
    GenerateRejected,
    NoHealthyWorker,
    NoRouter,
    NoWorker,
    RequestAborted,
    RequestLost,
    RouterRefused,
    SamplingParams,
    UnpublishedWeights,
)

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5, stop=["x"], stop_token_ids=[1], seed=7)


def run(parts, scenario):
    async def main():
        async with parts() as p:
            return await asyncio.wait_for(scenario(p), 20)

    return asyncio.run(main())


def test_ids_go_in_and_ids_logprobs_and_versions_come_out(parts):
    async def scenario(p):
        engine = await p.engine()
        engine.label = "12"
        router = await p.router(engine)
        client = GenerateClient(lambda: router.url, p.http, 100)
        found = await client.generate([1, 2, 3], SAMPLING, deadline_s=5, routing_key="s1")
        return found, router.requests[0]

    found, (body, headers) = run(parts, scenario)
    assert found.token_ids == [3, 2, 1]
    assert found.logprobs == [0.0, -0.5, -1.0]
    assert found.weight_versions == [(12, 0, 3)]
    assert (found.finish_reason, found.text) == ("stop", "back")
    assert headers["X-SMG-Routing-Key"] == "s1"
    assert body["input_ids"] == [1, 2, 3] and body["return_logprob"] is True
    assert body["sampling_params"]["sampling_seed"] == 7


@pytest.mark.parametrize("ids", [[], [1, 100], [-1]])
def test_ids_outside_the_vocabulary_never_leave_this_process(parts, ids):
    async def scenario(p):
        router = await p.router()
        client = GenerateClient(lambda: router.url, p.http, 100)
        with pytest.raises(GenerateRejected, match="input_ids"):
            await client.generate(ids, SAMPLING, deadline_s=5)
        return router.requests

    assert run(parts, scenario) == []


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_wrong_request_is_not_sent_again(parts, status):
    async def scenario(p):
        router = await p.router()
        router.answers = [(status, {"error": {"message": "too long"}})]
        client = GenerateClient(lambda: router.url, p.http, 100)
        with pytest.raises(GenerateRejected, match="too long"):
            await client.generate([1], SAMPLING, deadline_s=5)
        return len(router.requests)

    assert run(parts, scenario) == 1


def test_lost_failed_aborted_and_broken_answers_are_drawn_again_with_the_same_seed(parts, make_answer):
    async def scenario(p):
        engine = await p.engine()
        router = await p.router(engine)
        router.answers = [
            (0, None),
            (500, {"error": {"message": "dead"}}),
            (200, make_answer([1, 2], reason="abort")),
            (200, {"nonsense": True}),
            (200, make_answer([1, 2], output_token_logprobs=[])),
            (200, make_answer([1, 2], weight_versions=[{"version": "1", "start": 1, "end": 2}])),
        ]
        client = GenerateClient(lambda: router.url, p.http, 100)
        found = await client.generate([1, 2], SAMPLING, deadline_s=15, rid="g1")
        return found, [body for body, _ in router.requests], client.retries

    found, bodies, retries = run(parts, scenario)
    assert (found.token_ids, found.finish_reason, retries) == ([2, 1], "stop", 6)
    assert [body.pop("rid") for body in bodies] == ["g1", *(f"g1_{n}" for n in range(2, 8))]
    assert all(body == bodies[0] for body in bodies)


def test_each_kind_of_absence_has_its_own_error_at_the_deadline(parts, make_answer):
    async def scenario(p):
        engine = await p.engine()
        empty, ill, failing, aborting = await p.router(), await p.router(engine), await p.router(), await p.router()
        next(iter(ill.workers.values()))["is_healthy"] = False
        failing.answers = [(500, {"error": {"message": "dead"}})] * 50
        aborting.answers = [(200, make_answer([1], reason="abort"))] * 50
        hanging = await p.router()
        hanging.hang = True
        cases = {
            NoRouter: None,
            RouterRefused: "http://127.0.0.1:1",
            NoWorker: empty.url,
            NoHealthyWorker: ill.url,
            EngineFailed: failing.url,
            RequestAborted: aborting.url,
            RequestLost: hanging.url,
        }
        for error, url in cases.items():
            client = GenerateClient(lambda url=url: url, p.http, 100)
            started = time.monotonic()
            with pytest.raises(error, match="attempts in"):
                await client.generate([1], SAMPLING, deadline_s=0.4)
            assert time.monotonic() - started < 2

    run(parts, scenario)


def test_a_router_that_comes_late_is_used(parts):
    async def scenario(p):
        engine = await p.engine()
        urls: list[str] = []
        client = GenerateClient(lambda: urls[0] if urls else None, p.http, 100)
        call = asyncio.ensure_future(client.generate([1, 2], SAMPLING, deadline_s=10))
        await asyncio.sleep(0.1)
        urls.append((await p.router(engine)).url)
        return (await call).token_ids

    assert run(parts, scenario) == [2, 1]


def test_a_request_to_a_router_that_left_the_address_book_is_given_up_at_once(parts):
    async def scenario(p):
        engine = await p.engine()
        dead, alive = await p.router(), await p.router(engine)
        dead.hang = True
        urls = [dead.url]
        client = GenerateClient(lambda: urls[0], p.http, 100)
        call = asyncio.ensure_future(client.generate([1, 2], SAMPLING, deadline_s=30))
        await asyncio.sleep(0.2)
        urls[0] = alive.url
        started = time.monotonic()
        assert (await call).token_ids == [2, 1]
        return time.monotonic() - started

    assert run(parts, scenario) < 5


def test_weights_that_nobody_published_are_not_sampled_when_that_is_asked(parts):
    async def scenario(p):
        engine = await p.engine()
        router = await p.router(engine)
        client = GenerateClient(lambda: router.url, p.http, 100, published_only=True)
        with pytest.raises(UnpublishedWeights):
            await client.generate([1], SAMPLING, deadline_s=0.3)
        engine.label = "3"
        return (await client.generate([1], SAMPLING, deadline_s=5)).weight_versions

    assert run(parts, scenario) == [(3, 0, 1)]


def test_a_cancelled_call_leaves_no_request_behind(parts):
    async def scenario(p):
        router = await p.router()
        router.hang = True
        call = asyncio.ensure_future(
            GenerateClient(lambda: router.url, p.http, 100).generate([1], SAMPLING, deadline_s=30)
        )
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.05)
        return [t for t in asyncio.all_tasks() if "GenerateClient" in repr(t)]

    assert run(parts, scenario) == []


def test_proxy_variables_are_ignored(parts, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def scenario(p):
        router = await p.router(await p.engine())
        return (await GenerateClient(lambda: router.url, p.http, 100).generate([1], SAMPLING, deadline_s=2)).token_ids

    assert run(parts, scenario) == [1]


def test_an_aborted_answer_has_what_was_drawn_until_then_where_its_caller_wants_it(parts, make_answer):
    async def scenario(p):
        router = await p.router()
        router.answers = [
            (200, make_answer([1, 2, 3], "4", reason="abort", cached_tokens=2, prompt_tokens=3)),
            # One log-prob is missing: the tokens from there on are of no use.
            (200, make_answer([1, 2, 3], "4", reason="abort", output_token_logprobs=[[-1.0, 3, None]])),
            (200, {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}),
            (200, make_answer([1, 2, 3], "4", "abort", weight_versions=[{"version": "4", "start": 1, "end": 3}])),
        ]
        client = GenerateClient(lambda: router.url, p.http, 100)
        return [
            await client.generate([1, 2], SAMPLING, deadline_s=15, rid="g", take_aborted=lambda: True)
            for _ in range(len(router.answers))
        ]

    whole, short, *nothing = run(parts, scenario)
    assert (whole.token_ids, whole.logprobs, whole.weight_versions) == ([3, 2, 1], [0.0, -0.5, -1.0], [(4, 0, 3)])
    assert whole.finish_reason == "abort" and whole.stats == {"cached_tokens": 2, "prompt_tokens": 3}
    assert (short.token_ids, short.logprobs, short.weight_versions) == ([3], [-1.0], [(4, 0, 1)])
    assert all((one.token_ids, one.logprobs, one.weight_versions) == ([], [], []) for one in nothing)
