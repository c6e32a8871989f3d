"""Server-sent events of a request that is generated: what there is by now, now and then, and `[DONE]` at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from miles_hpc.engine import rendering
from miles_hpc.engine.requests import Backend, Request, Result

INTERVAL_S = 0.25
"""Between two looks at what a request has. SGLang counts tokens instead; readers may rely on neither."""
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}
_encoder = msgspec.json.Encoder()


async def stream_generate(
    http: web.Request, request: Request, result: asyncio.Future[Result], backend: Backend, *, incremental: bool
) -> web.StreamResponse:
    """`/generate` with `stream`: each event is the answer so far, or, incremental, what is new of it.

    The text of an incremental one is in its last event: what ends the answer may take some of it back.
    """
    response: web.StreamResponse | None = None
    told = 0
    while not await _ended(result):
        response = response or await _open(http)
        partial = backend.partial(request.rid)
        if partial is not None and len(partial.output_ids) > told:
            answer = rendering.partial_answer(request, partial, backend)
            if incremental:
                answer = {**rendering.from_token(answer, told), "text": ""}
            told = len(partial.output_ids)
            await response.write(_event(answer))
    whole = rendering.generate_answer(request, result.result(), backend)
    if incremental:
        whole = rendering.from_token(whole, told)
    if response is None:
        # A short answer is one packet: its head, its one event and its end together.
        return web.Response(body=_event(whole) + _DONE, headers=_HEADERS)
    return await _close(response, whole)


async def stream_chat(
    http: web.Request,
    body: Mapping[str, Any],
    request: Request,
    result: asyncio.Future[Result],
    backend: Backend,
) -> web.StreamResponse:
    """`/v1/chat/completions` with `stream`: each event has the text that is new."""
    response = await _open(http)
    await response.write(_event(rendering.chat_chunk(body, request, backend, {"role": "assistant", "content": ""})))
    told = ""
    while not await _ended(result):
        partial = backend.partial(request.rid)
        text = told if partial is None else rendering.settled_text(request, partial, backend)
        if len(text) > len(told) and text.startswith(told):
            delta, told = text[len(told) :], text
            await response.write(_event(rendering.chat_chunk(body, request, backend, {"content": delta})))
    whole = result.result()
    text = rendering.output_text(request, whole, backend.tokenizer)
    rest = {"content": text[len(told) :]} if text.startswith(told) else {}
    last = rendering.chat_chunk(body, request, backend, rest, finish=whole.finish)
    extension = rendering.chat_extension(body, [request], [whole])
    if extension:
        await response.write(_event(last))
        last = {**rendering.chat_chunk(body, request, backend, None), "sglext": extension}
    return await _close(response, last)


async def _open(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(http)
    return response


async def _ended(result: asyncio.Future[Result]) -> bool:
    done, _ = await asyncio.wait({result}, timeout=INTERVAL_S)
    return bool(done)


def _event(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


async def _close(response: web.StreamResponse, last: Any) -> web.StreamResponse:
    await response.write_eof(_event(last) + _DONE)
    return response
