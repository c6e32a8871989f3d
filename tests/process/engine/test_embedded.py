"""The embedded engine over HTTP: exact log-probs, seeds, batching, pauses and weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

Talk = Callable[..., None]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 131 + i * 17 + i * i) % 500 + 3 for i in range(length)]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [row[0] for row in answer["meta_info"]["output_token_logprobs"]]


def test_logprobs_equal_a_full_forward_pass_whatever_the_batch(
    fresh: Any, talk: Talk, recomputed: Any, models: list[Path]
) -> None:
    settings = [(1, 40, 1.0), (7, 90, 0.7), (33, 20, 0.0), (180, 64, 1.3), (2, 150, 1.0), (60, 5, 0.0), (14, 30, 1.0)]
    answers: list[Any] = []

    async def do(client: Any) -> None:
        answers.extend(
            await asyncio.gather(
                *(
                    client.generate(prompt(i, length), max_new_tokens=count, temperature=temperature, sampling_seed=i)
                    for i, (length, count, temperature) in enumerate(settings)
                )
            )
        )

    talk(fresh.url, do)
    worst = 0.0
    for i, ((length, count, temperature), answer) in enumerate(zip(settings, answers, strict=True)):
        assert len(answer["output_ids"]) == count
        full = recomputed(models[0], prompt(i, length) + answer["output_ids"], temperature or 1.0)[-count:]
        worst = max(worst, *(abs(a - b) for a, b in zip(logprobs_of(answer), full, strict=True)))
    assert worst < 1e-4, worst


def test_prompt_logprobs_equal_a_full_forward_pass(fresh: Any, talk: Talk, recomputed: Any, models: list[Path]) -> None:
    ids = prompt(3, 50)

    async def do(client: Any) -> None:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        answer = await client.post("/generate", {**body, "logprob_start_len": 0, "top_logprobs_num": 2})
        assert answer["output_ids"] == []
        rows = answer["meta_info"]["input_token_logprobs"]
        assert rows[0] == [None, ids[0], None]
        full = recomputed(models[0], ids)
        assert max(abs(row[0] - value) for row, value in zip(rows[1:], full, strict=True)) < 1e-4
        assert [len(row) for row in answer["meta_info"]["input_top_logprobs"][1:]] == [2] * 49

    talk(fresh.url, do)


def test_seeds_and_greedy_give_the_same_tokens_alone_and_in_any_batch(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        def one(i: int) -> Any:
            temperature = 0.0 if i % 4 == 0 else 1.0
            limits = {"top_p": 0.9} if i % 4 == 1 else {"top_k": 20} if i % 4 == 2 else {}
            return client.generate(
                prompt(i % 3, 12), max_new_tokens=40, temperature=temperature, sampling_seed=i, **limits
            )

        alone = [(await one(i))["output_ids"] for i in range(16)]
        together = [answer["output_ids"] for answer in await asyncio.gather(*(one(i) for i in range(16)))]
        background = asyncio.ensure_future(client.generate(prompt(9, 3), max_new_tokens=300))
        trickled = []
        for i in range(16):
            trickled.append(asyncio.ensure_future(one(i)))
            await asyncio.sleep(0.003)
        assert together == alone
        assert [answer["output_ids"] for answer in await asyncio.gather(*trickled)] == alone
        await background
        assert len({tuple(ids) for ids in alone}) >= 13

    talk(fresh.url, do)


def test_unseeded_samples_differ_and_n_samples_come_in_a_list(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        for extra in ({}, {"sampling_seed": 4}):
            answers = await client.generate(prompt(0, 8), max_new_tokens=20, n=4, **extra)
            assert len({tuple(answer["output_ids"]) for answer in answers}) == 4

    talk(fresh.url, do)


def test_a_short_request_inside_a_long_one_returns_first(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        long = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=500))
        await client.running(1, tokens=40)
        short = await client.generate(prompt(2, 10), max_new_tokens=5)
        assert not long.done()
        assert len(short["output_ids"]) == 5
        assert len((await long)["output_ids"]) == 500

    talk(fresh.url, do)


def test_sixteen_streams_make_at_least_three_times_the_tokens_of_one(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        async def rate(streams: int) -> float:
            start = time.perf_counter()
            await asyncio.gather(*(client.generate(prompt(i, 16), max_new_tokens=120) for i in range(streams)))
            return streams * 120 / (time.perf_counter() - start)

        await rate(2)
        one, sixteen = await rate(1), await rate(16)
        assert sixteen >= 3 * one, f"{one:.0f} tokens/s alone, {sixteen:.0f} of 16"

    talk(fresh.url, do)


def test_it_answers_health_while_it_computes_and_more_requests_wait_than_fit(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        many = [asyncio.ensure_future(client.generate(prompt(i, 30), max_new_tokens=60)) for i in range(150)]
        await client.running(64)
        waits = []
        for _ in range(10):
            start = time.perf_counter()
            async with client.http.get(client.url + "/health") as answer:
                assert answer.status == 200
            waits.append(time.perf_counter() - start)
        assert sorted(waits)[5] < 0.2
        answers = await asyncio.gather(*many)
        assert all(len(answer["output_ids"]) == 60 for answer in answers)

    talk(fresh.url, do)


def test_stop_texts_stop_ids_and_the_models_own_end(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        whole = await client.generate(prompt(5, 9), max_new_tokens=60, sampling_seed=1)
        text, ids = whole["text"], whole["output_ids"]
        stop_id = ids[10]
        cut = await client.generate(prompt(5, 9), max_new_tokens=60, sampling_seed=1, stop_token_ids=[stop_id])
        first = ids.index(stop_id)
        assert cut["output_ids"] == ids[: first + 1]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
        late = await client.generate(
            prompt(5, 9), max_new_tokens=60, sampling_seed=1, stop_token_ids=[stop_id], min_new_tokens=first + 5
        )
        assert len(late["output_ids"]) > first + 1
        # Two characters that stand in different tokens show that a stop may span tokens.
        stop = next(text[i : i + 2] for i in range(8, 40) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)
        found = await client.generate(prompt(5, 9), max_new_tokens=60, sampling_seed=1, stop=[stop])
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert found["text"] == text.split(stop)[0]
        assert found["output_ids"] == ids[: len(found["output_ids"])]

    talk(fresh.url, do)


def test_out_of_range_ids_are_refused_and_the_engine_lives(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        for ids in ([512], [99999], [-1], [5] * 1024):
            error = await client.post("/generate", {"input_ids": ids}, status=400)
            assert "error" in error
        assert len((await client.generate([511], max_new_tokens=2))["output_ids"]) == 2

    talk(fresh.url, do)


def test_stop_ids_that_the_model_does_not_have_are_no_danger_to_the_engine(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        plain = await client.generate(prompt(3, 5), max_new_tokens=6, sampling_seed=1, ignore_eos=True)
        more = {"stop_token_ids": [512, 99999, -1], "min_new_tokens": 3, "ignore_eos": True}
        answer = await client.generate(prompt(3, 5), max_new_tokens=6, sampling_seed=1, **more)
        assert answer["output_ids"] == plain["output_ids"]

    talk(fresh.url, do)


def test_abort_by_rid_returns_200_with_the_tokens_so_far(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        task = asyncio.ensure_future(client.generate(prompt(1, 4), rid="long-1", max_new_tokens=900))
        other = asyncio.ensure_future(client.generate(prompt(2, 4), rid="other", max_new_tokens=100, sampling_seed=3))
        await client.running(2, tokens=60)
        await client.post("/abort_request", {"rid": "long-1"})
        answer = await task
        assert answer["meta_info"]["id"] == "long-1"
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 900
        assert len(answer["output_ids"]) == len(logprobs_of(answer))
        undisturbed = await client.generate(prompt(2, 4), max_new_tokens=100, sampling_seed=3)
        assert (await other)["output_ids"] == undisturbed["output_ids"]

    talk(fresh.url, do)


def test_a_client_that_leaves_frees_its_place(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        task = asyncio.ensure_future(client.generate(prompt(1, 4), max_new_tokens=1000))
        await client.running(1)
        task.cancel()
        for _ in range(200):
            if (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the request still runs after its client left")

    talk(fresh.url, do, 20)


def test_retract_keeps_tokens_and_continues_under_the_new_weights(
    fresh: Any, talk: Talk, recomputed: Any, models: list[Path]
) -> None:
    answers: list[Any] = []

    async def do(client: Any) -> None:
        tasks = [
            asyncio.ensure_future(client.generate(prompt(i, 10 + i), max_new_tokens=300, sampling_seed=i))
            for i in range(3)
        ]
        await client.running(3, tokens=120)
        await client.post("/pause_generation", {"mode": "retract"})
        await client.post("/flush_cache")
        held = asyncio.ensure_future(client.generate(prompt(8, 5), max_new_tokens=4))
        body = {"model_path": str(models[1]), "weight_version": "v1", "flush_cache": True}
        assert (await client.post("/update_weights_from_disk", body))["success"]
        assert (await client.get("/model_info"))["weight_version"] == "v1"
        async with client.http.get(client.url + "/health") as answer:
            assert answer.status == 200
        assert not held.done()
        await client.post("/continue_generation")
        answers.extend(await asyncio.gather(*tasks))
        assert (await held)["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 4}]

    talk(fresh.url, do)
    for i, answer in enumerate(answers):
        info = answer["meta_info"]
        assert info["num_retractions"] == 1
        cut = info["weight_versions"][0]["end"]
        assert info["weight_versions"] == [
            {"version": "v0", "start": 0, "end": cut},
            {"version": "v1", "start": cut, "end": 300},
        ]
        ids = prompt(i, 10 + i) + answer["output_ids"]
        found = logprobs_of(answer)
        old, new = (recomputed(model, ids)[-300:] for model in models)
        assert max(abs(a - b) for a, b in zip(found[:cut], old[:cut], strict=True)) < 1e-4
        assert max(abs(a - b) for a, b in zip(found[cut:], new[cut:], strict=True)) < 1e-4


def test_in_place_keeps_the_cache_and_refuses_to_flush_it(fresh: Any, talk: Talk, models: list[Path]) -> None:
    async def do(client: Any) -> None:
        task = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=300))
        await client.running(1, tokens=30)
        await client.post("/pause_generation", {"mode": "in_place"})
        await client.post("/flush_cache", status=400)
        body = {"model_path": str(models[1]), "weight_version": "v1"}
        refused = await client.post("/update_weights_from_disk", body, status=400)
        assert not refused["success"]
        assert (await client.get("/model_info"))["weight_version"] == "v0"
        await client.post("/update_weights_from_disk", {**body, "flush_cache": False})
        await client.post("/continue_generation")
        info = (await task)["meta_info"]
        assert [span["version"] for span in info["weight_versions"]] == ["v0", "v1"]
        assert info["num_retractions"] == 0

    talk(fresh.url, do)


def test_pause_aborts_by_default_and_holds_what_comes(fresh: Any, talk: Talk) -> None:
    async def do(client: Any) -> None:
        task = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=900))
        await client.running(1, tokens=20)
        await client.post("/pause_generation")
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        held = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=3))
        await asyncio.sleep(0.1)
        assert not held.done()
        await client.post("/continue_generation")
        assert len((await held)["output_ids"]) == 3

    talk(fresh.url, do)


def test_an_update_without_a_pause_waits_for_what_runs(fresh: Any, talk: Talk, models: list[Path]) -> None:
    async def do(client: Any) -> None:
        task = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=200))
        await client.running(1)
        body = {"model_path": str(models[1]), "weight_version": "v1"}
        update = asyncio.ensure_future(client.post("/update_weights_from_disk", body))
        await asyncio.sleep(0.02)
        late = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=3))
        assert (await task)["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 200}]
        assert (await update)["success"]
        assert (await late)["meta_info"]["weight_version"] == "v1"
        aborted = asyncio.ensure_future(client.generate(prompt(1, 10), max_new_tokens=900))
        await client.running(1)
        await client.post("/update_weights_from_disk", {**body, "abort_all_requests": True})
        assert (await aborted)["meta_info"]["finish_reason"]["type"] == "abort"

    talk(fresh.url, do)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    fresh: Any, talk: Talk, models: list[Path], make_model: Any, tmp_path: Path
) -> None:
    wide = make_model(tmp_path / "wide", 0, hidden_size=32)
    deep = make_model(tmp_path / "deep", 0, num_hidden_layers=3)
    torn = make_model(tmp_path / "torn", 1)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    cases = [
        ("/nope", "no directory /nope"),
        (str(tmp_path), "lacks its weights"),
        (str(wide), "expected [512, 64]"),
        (str(deep), "unexpected model.layers.2"),
        (str(torn), "is not readable"),
    ]

    async def do(client: Any) -> None:
        before = await client.generate(prompt(1, 10), max_new_tokens=20, temperature=0)
        for path, expected in cases:
            body = {"model_path": path, "weight_version": "bad"}
            answer = await client.post("/update_weights_from_disk", body, status=400)
            assert not answer["success"]
            assert expected in answer["message"]
        after = await client.generate(prompt(1, 10), max_new_tokens=20, temperature=0)
        assert (after["output_ids"], logprobs_of(after)) == (before["output_ids"], logprobs_of(before))
        assert after["meta_info"]["weight_version"] == "v0"
        await client.post("/update_weights_from_disk", {"model_path": str(models[1])})
        other = await client.generate(prompt(1, 10), max_new_tokens=20, temperature=0)
        assert other["output_ids"] != before["output_ids"]
        assert other["meta_info"]["weight_version"] == "v0"  # without a label the old one stays, as in SGLang

    talk(fresh.url, do)


def test_chat_takes_ids_and_gives_ids_and_logprobs(fresh: Any, talk: Talk, recomputed: Any, models: list[Path]) -> None:
    async def do(client: Any) -> None:
        body = {
            "messages": [{"role": "user", "content": "12 + 34?"}],
            "max_tokens": 12,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "return_meta_info": True,
            "seed": 3,
        }
        choice = (await client.post("/v1/chat/completions", body))["choices"][0]
        again = (await client.post("/v1/chat/completions", {**body, "input_ids": choice["prompt_token_ids"]}))[
            "choices"
        ][0]
        assert again["response_token_ids"] == choice["response_token_ids"]
        full = recomputed(models[0], choice["prompt_token_ids"] + choice["response_token_ids"])[-12:]
        for found in (
            [entry["logprob"] for entry in choice["logprobs"]["content"]],
            [row[0] for row in choice["meta_info"]["output_token_logprobs"]],
        ):
            assert max(abs(a - b) for a, b in zip(found, full, strict=True)) < 1e-4

    talk(fresh.url, do)
