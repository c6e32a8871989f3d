"""The HTTP API answers in the shapes that the real SGLang 0.5.23 was recorded with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from miles_hpc.engine.api import EngineApi
from miles_hpc.engine.fake import FakeBackend

pytestmark = pytest.mark.unit

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((SAMPLES / f"{name}.json").read_text())
    return data


def shape(value: Any) -> Any:
    """Keys and kinds of a JSON value; of a list, the shape of its first element; numbers are one kind."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool) or value is None:
        return value
    return "number" if isinstance(value, int | float) else "text"


def same_shape(found: Any, recorded: Any) -> None:
    """Equal shapes, apart from what depends on the model: cache hits and which token stopped."""
    a, b = shape(found), shape(recorded)
    for tree in (a, b):
        for one in tree if isinstance(tree, list) else [tree]:
            if "meta_info" in one:
                one["meta_info"].pop("cached_tokens_details")
                one["meta_info"]["finish_reason"] = set(one["meta_info"]["finish_reason"])
    assert a == b


def served(model_dir: Path, do: Callable[[TestClient[Any, Any], FakeBackend], Awaitable[None]], **kwargs: Any) -> None:
    """Run `do` against an API over a fake engine."""

    async def run() -> None:
        backend = FakeBackend(str(model_dir), **{"token_ms": 0.0, **kwargs})
        async with TestClient(TestServer(EngineApi(backend, "127.0.0.1", 1).application())) as client:
            await do(client, backend)

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(
    "name", ["generate_ids", "generate_logprob", "generate_logprob_outonly", "generate_n2", "generate_batch"]
)
def test_generate_answers_as_recorded(model_dir: Path, name: str) -> None:
    recorded = sample(name)
    body = recorded["request"]["body"]
    body["sampling_params"]["ignore_eos"] = True

    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        answer = await client.post("/generate", json=body)
        assert answer.status == 200
        assert answer.content_type == "application/json"
        found, expected = await answer.json(), recorded["response"]
        if body.get("top_logprobs_num"):  # the fake engine knows one candidate for each position
            for one in (found, expected):
                assert one["meta_info"]["input_top_logprobs"][0] is None
                assert len(one["meta_info"].pop("input_top_logprobs")) == 4
                assert len(one["meta_info"].pop("output_top_logprobs")) == 8
        same_shape(found, expected)
        first = found[0] if isinstance(found, list) else found
        assert len(first["output_ids"]) == body["sampling_params"]["max_new_tokens"]

    served(model_dir, do)


def test_a_given_rid_comes_back_as_id_and_seeds_are_accepted(model_dir: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        body = {"rid": "mine", "text": "1 + 2", "sampling_params": {"sampling_seed": 7}}
        found = await (await client.post("/generate", json=body)).json()
        assert found["meta_info"]["id"] == "mine"
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert found["output_ids"][-1] == 2
        assert "<|im_end|>" not in found["text"]

    served(model_dir, do)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"sampling_params": {}}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [10] * 2000}, "The input (2000 tokens) is longer than the model's context length (512 tokens)."),
        ({"input_ids": [320]}, "token id 320 is out of range: the model has 320 ids."),
        ({"input_ids": [-1]}, "token id -1 is out of range"),
        ({"input_ids": []}, "at least one token id"),
        ({"input_ids": ["a"]}, "must hold integers"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 600}}, "maximum context length of 512 tokens"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1]"),
        ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "regex is not supported"),
        ({"input_ids": [1], "sampling_params": {"stop": 5}}, "stop must be a text or a list of texts, got 5"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": 5}}, "stop_token_ids must be a list"),
        ({"input_ids": [1], "sampling_params": {"presence_penalty": 0.5}}, "leave it at 0"),
        ({"input_ids": [[1], [2]], "stream": True}, "stream is for one sequence"),
        ({"text": "a", "rid": ["x"], "sampling_params": {"n": 0}}, "n must be an integer of at least 1"),
        ([], "must be a JSON object"),
    ],
)
def test_what_cannot_be_served_is_a_400_in_the_recorded_shape(model_dir: Path, body: Any, expected: str) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        answer = await client.post("/generate", json=body)
        found = await answer.json()
        assert answer.status == sample("generate_bad")["status"] == 400
        assert shape(found) == shape(sample("generate_bad")["response"])
        assert expected in found["error"]["message"]

    served(model_dir, do)


def test_the_recorded_texts_of_two_errors_are_the_same(model_dir: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        for body, name in (({}, "generate_bad"), ({"input_ids": [10] * 2000}, "generate_toolong")):
            assert await (await client.post("/generate", json=body)).json() == sample(name)["response"]

    served(model_dir, do, context_length=1024)


@pytest.mark.parametrize("name", ["chat", "q1_chat_all", "q1_chat_input_ids"])
def test_chat_answers_as_recorded(model_dir: Path, name: str) -> None:
    recorded = sample(name)
    body = {**recorded["request"]["body"], "ignore_eos": True}

    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status == 200
        found, expected = await answer.json(), recorded["response"]
        for one in (found, expected):  # the recorded server split reasoning off, and could reuse its cache
            one["choices"][0]["message"]["reasoning_content"] = None
            one["usage"]["completion_tokens_details"] = None
            one["choices"][0].get("meta_info", {}).pop("cached_tokens_details", None)
            for entry in one["choices"][0]["logprobs"]["content"]:
                entry["bytes"] = entry["bytes"][:1]
            for rows in ("input_top_logprobs", "output_top_logprobs"):
                one["choices"][0].get("meta_info", {}).pop(rows, None)
        assert shape(found) == shape(expected)
        assert len(found["choices"][0]["logprobs"]["content"]) == 6
        if "input_ids" in body:
            assert found["choices"][0]["prompt_token_ids"] == body["input_ids"]

    served(model_dir, do)


def test_chat_stops_at_a_text_that_is_cut_but_its_token_is_kept(model_dir: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "5 + 700"}],
            "return_token_ids": True,
            "seed": 1,
        }
        whole = (await (await client.post("/v1/chat/completions", json=body)).json())["choices"][0]
        stop = whole["message"]["content"][-1]
        cut = (await (await client.post("/v1/chat/completions", json={**body, "stop": [stop]})).json())["choices"][0]
        assert cut["finish_reason"] == "stop"
        assert cut["matched_stop"] == stop
        assert stop not in cut["message"]["content"]
        assert cut["response_token_ids"] == whole["response_token_ids"][: len(cut["response_token_ids"])]
        kept = await (
            await client.post("/v1/chat/completions", json={**body, "stop": [stop], "no_stop_trim": True})
        ).json()
        assert stop in kept["choices"][0]["message"]["content"]

    served(model_dir, do)


def test_chat_without_messages_is_refused_as_recorded(model_dir: Path) -> None:
    recorded = sample("q1_chat_input_ids_empty_messages")

    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        answer = await client.post("/v1/chat/completions", json=recorded["request"]["body"])
        assert answer.status == recorded["status"]
        assert await answer.json() == recorded["response"]

    served(model_dir, do)


@pytest.mark.parametrize("given", [{"messages": []}, {"tools": []}, ["a"]])
def test_template_keywords_that_are_the_engine_s_own_are_refused(model_dir: Path, given: Any) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        body = {"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": given}
        assert (await client.post("/v1/chat/completions", json=body)).status == 400

    served(model_dir, do)


def test_tokens_of_a_part_of_a_character_have_their_bytes(model_dir: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        tokens = backend.tokenizer.encode("é")
        assert b"".join(backend.tokenizer.token_bytes(token) for token in tokens) == "é".encode()

    served(model_dir, do)


@pytest.mark.parametrize(
    "name",
    ["pause_retract", "continue_retract", "abort_request", "update_weight_version", "flush_cache", "health",
     "health_generate"],
)  # fmt: skip
def test_control_calls_answer_as_recorded(model_dir: Path, name: str) -> None:
    recorded = sample(name)
    request = recorded["request"]

    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        answer = await client.request(request["method"], request["path"], json=request["body"])
        assert answer.status == recorded["status"]
        found = await answer.text()
        assert (json.loads(found) if isinstance(recorded["response"], dict) else found) == recorded["response"]

    served(model_dir, do)


def test_model_info_has_the_recorded_fields_and_both_names(model_dir: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        info = await (await client.get("/model_info")).json()
        assert info == await (await client.get("/get_model_info")).json()
        recorded = sample("model_info")["response"]
        recorded.pop("embedding")
        assert shape(info) == shape(recorded)
        server = await (await client.get("/server_info")).json()
        assert server == await (await client.get("/get_server_info")).json()
        assert {"model_path", "weight_version", "context_length", "max_running_requests", "internal_states"} <= set(
            server
        )
        models = await (await client.get("/v1/models")).json()
        assert shape(models) == shape(sample("v1_models")["response"])
        assert (await (await client.get("/v1/loads")).json())["loads"][0]["num_running_reqs"] == 0
        assert (await client.get("/get_load")).status == 404

    served(model_dir, do)


def test_a_weight_update_answers_as_recorded_and_a_bad_one_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        good, bad = sample("update_from_disk"), sample("update_from_disk_bad")
        body = {**good["request"]["body"], "model_path": str(model_dir)}
        answer = await client.post("/update_weights_from_disk", json=body)
        assert (answer.status, await answer.json()) == (200, good["response"])
        for path in ("/nope", str(tmp_path)):
            answer = await client.post("/update_weights_from_disk", json={"model_path": path, "weight_version": "v9"})
            found = await answer.json()
            assert answer.status == bad["status"]
            assert shape(found) == shape(bad["response"])
            assert path in found["message"]
        assert (await (await client.get("/model_info")).json())["weight_version"] == "v2"

    served(model_dir, do)


def test_an_update_moves_the_model_path_but_not_the_served_name(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")

    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        await client.post("/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "1"})
        info = await (await client.get("/model_info")).json()
        assert (info["model_path"], info["served_model_name"]) == (str(tmp_path), str(model_dir))
        assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == str(model_dir)

    served(model_dir, do)


def test_two_live_requests_cannot_have_one_rid(model_dir: Path) -> None:
    async def do(client: TestClient[Any, Any], backend: FakeBackend) -> None:
        body = {"rid": "a", "text": "1", "sampling_params": {"ignore_eos": True, "max_new_tokens": 20}}
        answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(2)))
        assert sorted(answer.status for answer in answers) == [200, 400]
        assert (await client.post("/generate", json=body)).status == 200

    served(model_dir, do, token_ms=5.0)
