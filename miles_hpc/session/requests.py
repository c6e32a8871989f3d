"""OpenAI's chat request and answer, as far as a session serves them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from miles_hpc.inference.answers import Generation, SamplingParams
from miles_hpc.session.errors import InvalidRequest
from miles_hpc.session.state import ChatRequest, text_of


class ChatDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that does not say otherwise gets."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    timeout_s: float
    stop: list[str] = []
    stop_token_ids: list[int] = []


class _Body(msgspec.Struct, kw_only=True):
    """Fields that are not named here are ignored, as SGLang does."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    tools: list[dict[str, Any]] | None = None
    timeout_s: float | None = None


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is served, and how its answer is wanted."""

    chat: ChatRequest
    stream: bool
    timeout_s: float


def read_request(body: bytes, defaults: ChatDefaults) -> ReadRequest:
    """Read the JSON body of a chat request.

    Raises:
        InvalidRequest: with what was expected and found.
    """
    try:
        raw = msgspec.json.decode(body, type=_Body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"not a chat request: {error}") from error
    if raw.n != 1:
        raise InvalidRequest(f"n is {raw.n}: a session has one history, so only n = 1 can be served")
    if not raw.messages:
        raise InvalidRequest("messages is empty")
    for position, message in enumerate(raw.messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{position}] has no role")
    # Templates take content as text; parts are joined here once.
    messages = [m if isinstance(m.get("content"), str) else {**m, "content": text_of(m)} for m in raw.messages]
    max_tokens = raw.max_completion_tokens if raw.max_completion_tokens is not None else raw.max_tokens
    stop = [raw.stop] if isinstance(raw.stop, str) else raw.stop
    sampling = SamplingParams(
        max_new_tokens=_given(max_tokens, defaults.max_tokens),
        temperature=_given(raw.temperature, defaults.temperature),
        top_p=_given(raw.top_p, defaults.top_p),
        top_k=_given(raw.top_k, defaults.top_k),
        stop=_given(stop, defaults.stop),
        stop_token_ids=_given(raw.stop_token_ids, defaults.stop_token_ids),
        seed=raw.seed,
    )
    return ReadRequest(
        chat=ChatRequest(messages=messages, sampling=sampling, tools=raw.tools or None),
        stream=raw.stream,
        timeout_s=_given(raw.timeout_s, defaults.timeout_s),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def chat_answer(session_id: str, prompt_tokens: int, generation: Generation) -> dict[str, Any]:
    """The answer in OpenAI's shape; token ids, log-probs and versions beside the message, as SGLang names them."""
    answer_tokens = len(generation.token_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "session_id": session_id,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": generation.text},
                "finish_reason": generation.finish_reason,
                "response_token_ids": generation.token_ids,
                "response_logprobs": generation.logprobs,
                "weight_versions": generation.weight_versions,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
        },
    }


def as_stream(answer: dict[str, Any]) -> bytes:
    """The whole answer as one server-sent chunk, for clients that insist on a stream."""
    choice = answer["choices"][0]
    chunk = {key: answer[key] for key in ("id", "created", "model", "usage")} | {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": choice["message"], "finish_reason": choice["finish_reason"]}],
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\ndata: [DONE]\n\n"
