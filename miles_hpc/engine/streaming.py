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
_encoder = msgspec.json.Encoder()


async def stream_generate(
    http: web.Request, request: Request, result: asyncio.Future[Result], backend: Backend
) -> web.StreamResponse:
    """`/generate` with `stream`: each event is the answer so far, cumulative; the last one is the whole answer."""
    response = await _open(http)
    told = 0
    while not await _ended(result):
        partial = backend.partial(request.rid)
        if partial is not None and len(partial.output_ids) > told:
            told = len(partial.output_ids)
            await _event(response, rendering.partial_answer(request, partial, backend))
    await _event(response, rendering.generate_answer(request, result.result(), backend))
    return await _close(response)


async def stream_chat(
    http: web.Request,
    body: Mapping[str, Any],
    request: Request,
    result: asyncio.Future[Result],
    backend: Backend,
) -> web.StreamResponse:
    """`/v1/chat/completions` with `stream`: each event has the text that is new."""
    response = await _open(http)
    await _event(response, rendering.chat_chunk(body, request, backend, {"role": "assistant", "content": ""}))
    told = ""
    while not await _ended(result):
        partial = backend.partial(request.rid)
        text = told if partial is None else rendering.settled_text(request, partial, backend)
        if len(text) > len(told) and text.startswith(told):
            delta, told = text[len(told) :], text
            await _event(response, rendering.chat_chunk(body, request, backend, {"content": delta}))
    whole = result.result()
    text = rendering.output_text(request, whole, backend.tokenizer)
    rest = {"content": text[len(told) :]} if text.startswith(told) else {}
    await _event(response, rendering.chat_chunk(body, request, backend, rest, finish=whole.finish))
    extension = rendering.chat_extension(body, [request], [whole])
    if extension:
        await _event(response, {**rendering.chat_chunk(body, request, backend, None), "sglext": extension})
    return await _close(response)


async def _open(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    return response


async def _ended(result: asyncio.Future[Result]) -> bool:
    done, _ = await asyncio.wait({result}, timeout=INTERVAL_S)
    return bool(done)


async def _event(response: web.StreamResponse, value: Any) -> None:
    await response.write(b"data: " + _encoder.encode(value) + b"\n\n")


async def _close(response: web.StreamResponse) -> web.StreamResponse:
    await response.write(_DONE)
    await response.write_eof()
    return response
