"""The contract of tests/sglang/contract on the embedded engine, and where it differs from SGLang on purpose."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_CONTRACT = Path(__file__).parents[2] / "sglang" / "contract"
for name, file in (
    ("engine_contract", "cases"),
    ("stream_contract", "stream_cases"),
    ("weight_contract", "weight_cases"),
):
    if name not in sys.modules:
        _SPEC = importlib.util.spec_from_file_location(name, _CONTRACT / f"{file}.py")
        sys.modules[name] = importlib.util.module_from_spec(_SPEC)
        _SPEC.loader.exec_module(sys.modules[name])
    globals().update({name: case for name, case in vars(sys.modules[name]).items() if name.startswith("test_")})
cases = sys.modules["engine_contract"]

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def contract_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from miles_hpc.config.schema import MakeModelConfig
    from miles_hpc.train.make_model import make_model

    base = tmp_path_factory.mktemp("contract")
    return [make_model(MakeModelConfig(), seed, base / f"model-{seed}") for seed in (0, 1)]


@pytest.fixture(scope="module")
def start(contract_models: list[Path], server_class: Any) -> Iterator[Any]:
    """`start("--flag", …)`: an engine of these tests, as a Subject."""
    servers = []

    def one(*more: str) -> Any:
        arguments = ("--model-path", str(contract_models[0]), "--context-length", "1024", *more)
        servers.append(server_class("miles_hpc.engine.serve", *arguments))
        servers[-1].wait_until_up()
        return cases.Subject(servers[-1].url, contract_models)

    try:
        yield one
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def engine(start: Any) -> Any:
    return start("--incremental-streaming-output")


@pytest.fixture(scope="module")
def incremental(engine: Any) -> Any:
    return engine


@pytest.fixture(scope="module")
def cumulative(start: Any) -> Any:
    return start()


def test_an_id_that_the_model_does_not_have_is_a_400_and_not_the_end_of_the_engine(engine):
    async def body(talk):
        answer = await talk.post("/generate", talk.body([99999], 4), status=400)
        assert "out of range" in answer["error"]["message"]
        await talk.generate(cases.PROMPT, 4)

    engine.run(body)


def test_seeds_give_the_same_tokens_alone_and_in_any_batch(engine):
    import asyncio

    async def body(talk):
        prompts = [[*cases.PROMPT, extra] for extra in range(60, 72)]
        draw = {"temperature": 1.0, "sampling_seed": 7}
        alone = [(await talk.generate(ids, 24, sampling=draw))["output_ids"] for ids in prompts]
        together = await asyncio.gather(*(talk.generate(ids, 24, sampling=draw) for ids in reversed(prompts)))
        assert [one["output_ids"] for one in reversed(together)] == alone
        other = await talk.generate(prompts[0], 24, sampling={**draw, "sampling_seed": 8})
        assert other["output_ids"] != alone[0]

    engine.run(body)


def test_in_place_with_a_flush_leaves_the_old_weights(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "in_place"})
        await talk.load(1, "v1", status=400)
        await talk.post("/abort_request", {"abort_all": True})
        await talk.post("/continue_generation")
        await one
        assert (await talk.generate(cases.PROMPT, 24))["output_ids"] == engine.expected[0]

    engine.run(body)


def test_a_new_request_after_an_in_place_swap_meets_no_old_keys_and_values(engine):
    async def body(talk):
        one = talk.begin()
        await talk.running()
        await talk.post("/pause_generation", {"mode": "in_place"})
        await talk.load(1, "v1", flush_cache=False)
        await talk.post("/continue_generation")
        assert (await talk.generate(cases.PROMPT, 24))["output_ids"] == engine.expected[1]
        await one

    engine.run(body)


def test_an_update_keeps_the_served_name(engine):
    async def body(talk):
        before = (await talk.get("/model_info"))["served_model_name"]
        await talk.load(1, "v1")
        assert (await talk.get("/model_info"))["served_model_name"] == before

    engine.run(body)


@pytest.mark.parametrize("fault", ["shape", "name"])
def test_weights_that_do_not_fit_are_a_400_with_the_engines_own_words_and_the_old_ones_keep_serving(
    engine, fault, tmp_path
):
    path = sys.modules["weight_contract"].misfit(engine.models[1], tmp_path / "misfit", fault)

    async def body(talk):
        bad = {"model_path": str(path), "weight_version": "v9"}
        answer = await talk.post("/update_weights_from_disk", bad, status=400)
        assert answer["success"] is False and len(answer["message"]) > 20
        assert await talk.version() == "v0"
        assert (await talk.generate(cases.PROMPT, 24))["output_ids"] == engine.expected[0]

    engine.run(body)
