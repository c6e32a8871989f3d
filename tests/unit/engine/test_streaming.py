"""Streams of the fake engine in SGLang's two forms: both make the same answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from miles_hpc.engine import streaming
from miles_hpc.engine.api import EngineApi
from miles_hpc.engine.fake import FakeBackend

pytestmark = pytest.mark.unit

BODY = {
    "rid": "r",
    "text": "1 + 2",
    "return_logprob": True,
    "stream": True,
    "sampling_params": {"ignore_eos": True, "max_new_tokens": 60000, "sampling_seed": 3, "temperature": 1.0},
}


async def events_of(answer: Any, until: int = 0) -> list[dict[str, Any]]:
    """The events of a stream to its end, or the first `until` ones."""
    found = []
    async for line in answer.content:
        if line.startswith(b"data: {"):
            found.append(json.loads(line.removeprefix(b"data: ")))
            if len(found) == until:
                break
        elif line.startswith(b"data: [DONE]"):
            break
    return found


def streamed(model_dir: Path, *, incremental: bool) -> list[dict[str, Any]]:
    """An answer that is aborted after its third event."""

    async def run() -> list[dict[str, Any]]:
        backend = FakeBackend(str(model_dir), token_ms=5.0, context_length=65536)
        api = EngineApi(backend, "127.0.0.1", 1, incremental=incremental)
        async with TestClient(TestServer(api.application())) as client:
            answer = await client.post("/generate", json=BODY)
            first = await events_of(answer, until=3)
            await client.post("/abort_request", json={"rid": "r"})
            return first + await events_of(answer)

    return asyncio.run(asyncio.wait_for(run(), 50))


def test_events_are_the_answer_so_far_or_what_is_new_of_it(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "INTERVAL_S", 0.02)
    ids: dict[bool, list[int]] = {}
    for incremental in (False, True):
        events = streamed(model_dir, incremental=incremental)
        assert len(events) >= 4
        before: list[int] = []
        for event in events:
            meta = event["meta_info"]
            before = before + event["output_ids"] if incremental else event["output_ids"]
            rows = meta["output_token_logprobs"]
            assert [token for _, token, _ in rows] == event["output_ids"]
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == len(before)
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": len(before)}]
        tokenizer = FakeBackend(str(model_dir)).tokenizer
        texts = [event["text"] for event in events]
        assert ("".join(texts) if incremental else texts[-1]) == tokenizer.decode(before)
        ids[incremental] = before
    same = min(map(len, ids.values()))
    assert ids[True][:same] == ids[False][:same]
