"""Bodies of `/generate` and `/v1/chat/completions` to engine requests; anything unservable is a BadRequestError."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_hpc.engine.chat_tokenizer import ChatTemplateError
from miles_hpc.engine.requests import Backend, BadRequestError, Request, Sampling, sample_seed

_UNSUPPORTED = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params")
_NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def _integer(params: Mapping[str, Any], key: str, default: int, low: int) -> int:
    value = params.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise BadRequestError(f"{key} must be an integer of at least {low}, got {value!r}.")
    return value


def _number(params: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = params.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequestError(f"{key} must be a number in [{low:g}, {high:g}], got {value!r}.")
    return float(value)


def parse_sampling(params: Mapping[str, Any], backend: Backend, default_max_new_tokens: int = 128) -> Sampling:
    """Sampling params in SGLang's names.

    Raises:
        BadRequestError: for values out of range and for features that this engine does not have.
    """
    for key in _UNSUPPORTED:
        if params.get(key):
            raise BadRequestError(f"{key} is not supported by the {backend.kind} engine.")
    for key, neutral in _NEUTRAL.items():
        if params.get(key) not in (None, neutral):
            raise BadRequestError(f"{key} is not supported by the {backend.kind} engine; leave it at {neutral:g}.")
    top_k = _integer(params, "top_k", -1, -1)
    if top_k == 0:
        raise BadRequestError("top_k must be -1 (disable) or at least 1, got 0.")
    top_p = _number(params, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise BadRequestError("top_p must be in (0, 1], got 0.0.")
    stop = params.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequestError(f"stop must be a text or a list of texts, got {params.get('stop')!r}.")
    stop_ids = params.get("stop_token_ids") or ()
    if not isinstance(stop_ids, list | tuple) or not all(type(i) is int for i in stop_ids):
        raise BadRequestError("stop_token_ids must be a list of token ids.")
    eos = () if params.get("ignore_eos") else backend.tokenizer.stop_token_ids
    seed = params.get("sampling_seed", params.get("seed"))
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise BadRequestError(f"sampling_seed must be an integer, got {seed!r}.")
    return Sampling(
        max_new_tokens=_integer(params, "max_new_tokens", default_max_new_tokens, 0),
        min_new_tokens=_integer(params, "min_new_tokens", 0, 0),
        temperature=_number(params, "temperature", 1.0, 0.0, math.inf),
        top_p=top_p,
        top_k=top_k,
        min_p=_number(params, "min_p", 0.0, 0.0, 1.0),
        stop=tuple(stop),
        stop_token_ids=frozenset(stop_ids) | frozenset(eos),
        seed=seed,
        skip_special_tokens=params.get("skip_special_tokens") is not False,
        no_stop_trim=bool(params.get("no_stop_trim")),
    )


def check_ids(ids: Any, backend: Backend) -> list[int]:
    """A prompt as token ids that the model can take: one id out of range would kill a real engine."""
    if not isinstance(ids, list) or not ids:
        raise BadRequestError("input_ids must be a list of at least one token id.")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise BadRequestError(f"input_ids must hold integers, got {token!r}.")
        if not 0 <= token < backend.vocab_size:
            raise BadRequestError(f"token id {token} is out of range: the model has {backend.vocab_size} ids.")
    if len(ids) >= backend.context_length:
        raise BadRequestError(
            f"The input ({len(ids)} tokens) is longer than the model's context length "
            f"({backend.context_length} tokens)."
        )
    return ids


def check_length(ids: list[int], sampling: Sampling, backend: Backend) -> None:
    """Prompt and answer fit the context together, or BadRequestError."""
    total = len(ids) + sampling.max_new_tokens
    if total > backend.context_length:
        raise BadRequestError(
            f"Requested token count exceeds the model's maximum context length of {backend.context_length} tokens. "
            f"You requested a total of {total} tokens: {len(ids)} tokens from the input messages and "
            f"{sampling.max_new_tokens} tokens for the completion."
        )


def _prompts(body: Mapping[str, Any], backend: Backend) -> tuple[list[list[int]], bool]:
    """All prompts of a `/generate` body, and whether they came as a list."""
    if body.get("input_embeds") is not None or body.get("image_data") is not None:
        raise BadRequestError(f"input_embeds and image_data are not supported by the {backend.kind} engine.")
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise BadRequestError("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and text is not None:
        raise BadRequestError("Either text, input_ids or input_embeds should be provided, not more than one.")
    if ids is not None:
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return [check_ids(one, backend) for one in ids], True
        return [check_ids(ids, backend)], False
    many = isinstance(text, list)
    texts: list[Any] = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise BadRequestError("text must be a text or a list of texts.")
    return [check_ids(backend.tokenizer.encode(one, add_special_tokens=True), backend) for one in texts], many


def _each(value: Any, count: int, key: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequestError(f"{key} has {len(value)} entries for {count} prompts.")
    return value


def parse_generate(body: Any, backend: Backend) -> tuple[list[Request], bool]:
    """Requests of a `/generate` body in answer order, and whether the answer is a list.

    Raises:
        BadRequestError: when the body cannot be served.
    """
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object.")
    prompts, many = _prompts(body, backend)
    params = _each(body.get("sampling_params") or {}, len(prompts), "sampling_params")
    if not all(isinstance(one, dict) for one in params):
        raise BadRequestError("sampling_params must be an object.")
    logprob = _each(body.get("return_logprob", False), len(prompts), "return_logprob")
    starts = _each(body.get("logprob_start_len", -1), len(prompts), "logprob_start_len")
    tops = _each(body.get("top_logprobs_num", 0), len(prompts), "top_logprobs_num")
    samples = {_integer(one, "n", 1, 1) for one in params}
    if len(samples) != 1:
        raise BadRequestError("n must be the same for all prompts of a batch.")
    n = samples.pop()
    rids = body.get("rid")
    requests = []
    for index, ids in enumerate(prompts):
        sampling = parse_sampling(params[index], backend)
        check_length(ids, sampling, backend)
        for sample in range(n):
            requests.append(
                Request(
                    rid=_rid(rids, index, sample, many, n),
                    input_ids=ids,
                    sampling=_sample_of(sampling, sample),
                    return_logprob=bool(logprob[index]),
                    logprob_start_len=_integer({"logprob_start_len": starts[index]}, "logprob_start_len", -1, -1),
                    top_logprobs_num=_integer({"top_logprobs_num": tops[index]}, "top_logprobs_num", 0, 0),
                )
            )
    return requests, many or n > 1


def _sample_of(sampling: Sampling, index: int) -> Sampling:
    return replace(sampling, seed=sample_seed(sampling.seed, index))


def _rid(rids: Any, index: int, sample: int, many: bool, n: int) -> str:
    if rids is None:
        return uuid.uuid4().hex
    if isinstance(rids, list):
        if index >= len(rids):
            raise BadRequestError("rid has fewer entries than prompts.")
        rid = str(rids[index])
    else:
        rid = f"{rids}_{index}" if many else str(rids)
    return f"{rid}_{sample}" if n > 1 else rid


def parse_chat(body: Any, backend: Backend) -> list[Request]:
    """The n requests of a `/v1/chat/completions` body; `input_ids` replace the rendered messages.

    Raises:
        BadRequestError: when the body cannot be served.
    """
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("Messages cannot be empty.")
    if body.get("input_ids") is not None:
        ids = check_ids(body["input_ids"], backend)
    else:
        try:
            rendered = backend.tokenizer.render(
                messages, tools=body.get("tools"), **(body.get("chat_template_kwargs") or {})
            )
        except (ChatTemplateError, TypeError) as error:  # TypeError: a keyword of chat_template_kwargs that is ours
            raise BadRequestError(str(error)) from error
        ids = check_ids(rendered, backend)
    params = dict(body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    params["max_new_tokens"] = limit
    params.setdefault("min_new_tokens", body.get("min_tokens"))
    sampling = parse_sampling(params, backend, default_max_new_tokens=backend.context_length - len(ids))
    check_length(ids, sampling, backend)
    n = _integer(body, "n", 1, 1)
    rid = body.get("rid")
    return [
        Request(
            rid=_rid(rid, 0, sample, False, n),
            input_ids=ids,
            sampling=_sample_of(sampling, sample),
            return_logprob=bool(body.get("logprobs")),
            top_logprobs_num=_integer(body, "top_logprobs", 0, 0),
        )
        for sample in range(n)
    ]
