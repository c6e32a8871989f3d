"""The contract on the real SGLang, and where it differs from the embedded engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.specs.engine import engine_specs
from miles_hpc.train.make_model import make_model

cases, streams = sys.modules["engine_contract"], sys.modules["stream_contract"]
for module in (cases, streams, sys.modules["weight_contract"]):
    globals().update({name: case for name, case in vars(module).items() if name.startswith("test_")})

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def engine(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("contract")
    models = [Path(pair.config.model.path), make_model(MakeModelConfig(), 1, base / "model-1")]
    return cases.Subject(pair.engines[0].url, models, pair.key)


@pytest.fixture(scope="module")
def incremental(engine: Any) -> Any:
    """As the specs start one."""
    return engine


@pytest.fixture(scope="module")
def cumulative(engine: Any, pair: Any, real_config: Any) -> Iterator[Any]:
    """As somebody else may have started one; in no address book."""
    config = real_config("inference.sglang.incremental_streaming_output=false")
    config = msgspec.structs.replace(config, model=pair.config.model)
    program = pair.from_spec(engine_specs(config)[0], 80)
    try:
        pair.wait(program)
        yield cases.Subject(program.url, engine.models, pair.key)
    finally:
        pair.end_tree(program)


def test_an_incremental_stream_is_a_fraction_of_a_cumulative_one(incremental, cumulative):
    async def size(talk):
        return sum(len(json.dumps(event)) for event in await streams.events_of(talk, cases.LONG))

    assert 5 * incremental.run(size) < cumulative.run(size)


def test_in_place_with_a_flush_is_a_400_with_the_weights_already_swapped(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "in_place"})
        answer = await talk.load(1, "v1", status=400)
        assert "cache was not flushed" in answer["message"] and await talk.version() == "v0"
        await talk.post("/abort_request", {"abort_all": True})
        await talk.post("/continue_generation")
        await one
        await talk.idle()
        await talk.post("/flush_cache")
        assert (await talk.generate(cases.PROMPT, 24))["output_ids"] == engine.expected[1]

    engine.run(body)


def test_after_an_in_place_swap_without_a_flush_a_new_request_meets_old_keys_and_values(engine):
    """Why `inference.pause_mode = "in_place"` turns the prefix cache off."""

    async def body(talk):
        await talk.generate(cases.PROMPT * 8, 4)
        one = talk.begin([9, 8, 7])
        await talk.running()
        await talk.post("/pause_generation", {"mode": "in_place"})
        await talk.load(1, "v1", flush_cache=False)
        await talk.post("/continue_generation")
        mixed = await talk.generate(cases.PROMPT * 8, 24)
        assert mixed["meta_info"]["cached_tokens"] > 0
        await talk.post("/abort_request", {"abort_all": True})
        await one
        await talk.idle()
        await talk.post("/flush_cache")
        clean = await talk.generate(cases.PROMPT * 8, 24)
        assert clean["meta_info"]["cached_tokens"] == 0
        difference = [
            abs(a[0] - b[0])
            for a, b in zip(
                mixed["meta_info"]["output_token_logprobs"], clean["meta_info"]["output_token_logprobs"], strict=True
            )
        ]
        assert max(difference) > 1e-4 or mixed["output_ids"] != clean["output_ids"]

    engine.run(body)


def test_seeds_have_no_effect(engine):
    async def body(talk):
        draw = {"temperature": 1.0, "sampling_seed": 7}
        drawn = [(await talk.generate(cases.PROMPT, 24, sampling=draw))["output_ids"] for _ in range(3)]
        assert drawn[0] != drawn[1] or drawn[1] != drawn[2]

    engine.run(body)


def test_an_update_renames_the_served_model(engine):
    async def body(talk):
        await talk.load(1, "v1")
        assert (await talk.get("/model_info"))["served_model_name"] == str(engine.models[1])

    engine.run(body)


def test_without_its_key_an_engine_answers_health_only(engine):
    async def body(talk):
        for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/model_info", 401)):
            async with talk.http.get(engine.url + path, headers={"Authorization": ""}) as answer:
                assert answer.status == status, path
        async with talk.http.post(
            engine.url + "/generate", json=talk.body(cases.PROMPT, 4), headers={"Authorization": "Bearer wrong"}
        ) as answer:
            assert answer.status == 401

    engine.run(body)


def test_the_embedded_engine_gives_the_same_tokens_and_log_probs(engine, embedded):
    async def ask(subject):
        async def body(talk):
            prompts = [[*cases.PROMPT, extra] for extra in range(60, 68)]
            return await asyncio.gather(*(talk.generate(ids, 48) for ids in prompts))

        return await asyncio.to_thread(subject.run, body)

    async def both():
        return await ask(engine), await ask(embedded)

    real, ours = asyncio.run(both())
    for one, other in zip(real, ours, strict=True):
        assert one["output_ids"] == other["output_ids"]
        pairs = zip(one["meta_info"]["output_token_logprobs"], other["meta_info"]["output_token_logprobs"], strict=True)
        assert max(abs(a[0] - b[0]) for a, b in pairs) < 1e-4


@pytest.fixture
def embedded(engine: Any, pair: Any) -> Any:
    program = pair.embedded(90)
    try:
        yield cases.Subject(program.url, engine.models)
    finally:
        program.kill()
