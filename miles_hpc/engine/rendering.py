"""Engine results to the bodies that SGLang 0.5.23 answers with (recorded in tests/unit/engine/samples)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.engine.requests import Backend, Request, Result, TokenLogprob


def output_text(request: Request, result: Result, tokenizer: ChatTokenizer) -> str:
    """Text of the output, without the stop that ended it unless `no_stop_trim` was asked."""
    sampling = request.sampling
    ids = result.output_ids
    matched = result.finish.get("matched")
    if isinstance(matched, int) and not sampling.no_stop_trim and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
    if isinstance(matched, str) and not sampling.no_stop_trim:
        text = text.split(matched, 1)[0]
    return text


def _rows(entries: Sequence[TokenLogprob], tokenizer: ChatTokenizer | None) -> list[list[Any]]:
    return [[logprob, token, tokenizer.token_text(token) if tokenizer else None] for logprob, token in entries]


def meta_info(
    request: Request, result: Result, backend: Backend, *, texts: ChatTokenizer | None = None
) -> dict[str, Any]:
    """`meta_info` of one answer. `texts` fills the third column of log-prob rows; None leaves it null."""
    finished = result.finished_at or time.time()
    first = result.first_token_at or finished
    count = len(result.output_ids)
    decode_s = finished - first
    info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": result.finish,
        "prompt_tokens": len(request.input_ids),
        "weight_version": result.versions[-1][0] if result.versions else backend.weight_version,
        "num_retractions": result.num_retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": result.started_at or finished,
        "prefill_finished_time": first,
        "queue_time": max(0.0, (result.started_at or finished) - request.received_at),
    }
    if request.return_logprob:
        output = list(zip(result.output_logprobs, result.output_ids, strict=True))
        info["input_token_logprobs"] = _rows(result.input_logprobs, texts)
        info["output_token_logprobs"] = _rows(output, texts)
        info["output_token_logprobs_length"] = count
        if request.top_logprobs_num:
            info["input_top_logprobs"] = [None if row is None else _rows(row, texts) for row in result.input_top]
            info["output_top_logprobs"] = [_rows(row, texts) for row in result.output_top]
    info |= {
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_versions": spans(result),
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": finished - request.received_at,
        "request_received_ts": request.received_at,
        "first_token_latency": first - request.received_at,
        "api_server_dispatch_finish_ts": request.received_at,
        "request_finished_ts": finished,
        "decode_throughput": count / decode_s if decode_s > 0 else 0.0,
        "response_sent_to_client_ts": time.time(),
    }
    return info


def spans(result: Result) -> list[dict[str, Any]]:
    """`weight_versions`: which output tokens came from which weights."""
    return [{"version": version, "start": start, "end": end} for version, start, end in result.versions]


def generate_answer(request: Request, result: Result, backend: Backend) -> dict[str, Any]:
    """One `/generate` answer."""
    return {
        "text": output_text(request, result, backend.tokenizer),
        "output_ids": result.output_ids,
        "meta_info": meta_info(request, result, backend),
    }


def settled_text(request: Request, result: Result, backend: Backend) -> str:
    """Text of a running request that further tokens do not change: no half of a character at its end."""
    return output_text(request, result, backend.tokenizer).rstrip("\ufffd")


def partial_answer(request: Request, result: Result, backend: Backend) -> dict[str, Any]:
    """A `/generate` event of a running request: no finish reason and no spans yet."""
    answer = generate_answer(request, result, backend)
    answer["meta_info"]["finish_reason"] = None
    del answer["meta_info"]["weight_versions"]
    return answer


def from_token(answer: dict[str, Any], start: int) -> dict[str, Any]:
    """A `/generate` answer with ids and log-probs from output token `start` on, and counts and spans of all."""
    meta = answer["meta_info"]
    rows = {key: meta[key][start:] for key in ("output_token_logprobs", "output_top_logprobs") if key in meta}
    return {**answer, "output_ids": answer["output_ids"][start:], "meta_info": {**meta, **rows}}


def _token_entry(tokenizer: ChatTokenizer, logprob: float | None, token: int) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token), "bytes": list(tokenizer.token_bytes(token)), "logprob": logprob}


def _chat_logprobs(request: Request, result: Result, tokenizer: ChatTokenizer) -> dict[str, Any]:
    content = []
    for index, (token, logprob) in enumerate(zip(result.output_ids, result.output_logprobs, strict=True)):
        top = result.output_top[index] if request.top_logprobs_num else []
        entry = _token_entry(tokenizer, logprob, token)
        entry["top_logprobs"] = [_token_entry(tokenizer, value, other) for value, other in top]
        content.append(entry)
    return {"content": content}


def chat_answer(
    body: Mapping[str, Any], requests: list[Request], results: list[Result], backend: Backend
) -> dict[str, Any]:
    """A `/v1/chat/completions` answer with one choice per result."""
    tokenizer = backend.tokenizer
    choices = []
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": output_text(request, result, tokenizer),
                "reasoning_content": None,
            },
            "logprobs": _chat_logprobs(request, result, tokenizer) if request.return_logprob else None,
            "finish_reason": result.finish.get("type"),
            "matched_stop": result.finish.get("matched"),
        }
        if body.get("return_token_ids") or body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = request.input_ids
        if body.get("return_token_ids"):
            choice["response_token_ids"] = result.output_ids
        if body.get("return_meta_info"):
            choice["meta_info"] = meta_info(request, result, backend, texts=tokenizer)
        choices.append(choice)
    prompt = len(requests[0].input_ids)
    completion = sum(len(result.output_ids) for result in results)
    last = results[0]
    rid = requests[0].rid.removesuffix("_0") if len(requests) > 1 else requests[0].rid
    answer: dict[str, Any] = {
        "id": rid,
        "object": "chat.completion",
        "created": int(requests[0].received_at),
        "model": body.get("model") or backend.served_model_name,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {
            "weight_version": last.versions[-1][0] if last.versions else backend.weight_version,
            "weight_versions": spans(last),
        },
    }
    extension = chat_extension(body, requests, results)
    if extension:
        answer["sglext"] = extension
    return answer


def chat_extension(body: Mapping[str, Any], requests: list[Request], results: list[Result]) -> dict[str, Any]:
    """SGLang's own part of a chat answer, as far as it was asked for."""
    extension: dict[str, Any] = {}
    if body.get("return_input_ids_in_sglext"):
        extension["input_ids"] = requests[0].input_ids
    if body.get("return_output_ids_in_sglext"):
        extension["output_ids"] = [result.output_ids for result in results]
    return extension


def chat_chunk(
    body: Mapping[str, Any],
    request: Request,
    backend: Backend,
    delta: dict[str, Any] | None,
    finish: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One event of a streamed chat answer; without `delta` one that has no choice."""
    choice = {
        "index": 0,
        "delta": {"reasoning_content": None, **(delta or {})},
        "logprobs": None,
        "finish_reason": None if finish is None else finish.get("type"),
        "matched_stop": None if finish is None else finish.get("matched"),
    }
    return {
        "id": request.rid,
        "object": "chat.completion.chunk",
        "created": int(request.received_at),
        "model": body.get("model") or backend.served_model_name,
        "choices": [] if delta is None else [choice],
    }


def metrics(backend: Backend) -> str:
    """`/metrics`: what SGLang also has, under its names."""
    load = backend.load()
    capacity = backend.max_running_requests * backend.context_length
    values = {
        "num_running_reqs": ("gauge", load.running),
        "num_queue_reqs": ("gauge", load.waiting),
        "num_used_tokens": ("gauge", load.tokens),
        "token_usage": ("gauge", load.tokens / capacity),
        "generation_tokens_total": ("counter", load.generated),
    }
    label = f'{{model_name="{backend.served_model_name}"}}'
    return "".join(
        f"# TYPE sglang:{name} {kind}\nsglang:{name}{label} {float(value)}\n" for name, (kind, value) in values.items()
    )


def model_info(backend: Backend) -> dict[str, Any]:
    """`/model_info`."""
    return {
        "model_path": backend.model_path,
        "served_model_name": backend.served_model_name,
        "tokenizer_path": str(backend.tokenizer.model_dir),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": backend.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": backend.model_config.get("model_type"),
        "architectures": backend.model_config.get("architectures"),
    }


def server_info(backend: Backend, host: str, port: int, version: str) -> dict[str, Any]:
    """`/server_info`: the fields that callers of SGLang read."""
    load = backend.load()
    return {
        "model_path": backend.model_path,
        "served_model_name": backend.served_model_name,
        "tokenizer_path": str(backend.tokenizer.model_dir),
        "host": host,
        "port": port,
        "engine": backend.kind,
        "version": version,
        "weight_version": backend.weight_version,
        "context_length": backend.context_length,
        "max_running_requests": backend.max_running_requests,
        "max_total_num_tokens": backend.max_running_requests * backend.context_length,
        "dtype": "float32",
        "device": "cpu",
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "nnodes": 1,
        "disaggregation_mode": "null",
        "internal_states": [{"num_running_reqs": load.running, "num_waiting_reqs": load.waiting}],
    }


def loads(backend: Backend) -> dict[str, Any]:
    """`/v1/loads`."""
    load = backend.load()
    capacity = backend.max_running_requests * backend.context_length
    return {
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "loads": [
            {
                "timestamp": load.seen_at,
                "dp_rank": 0,
                "num_running_reqs": load.running,
                "num_waiting_reqs": load.waiting,
                "num_used_tokens": load.tokens,
                "num_total_tokens": load.tokens,
                "max_total_num_tokens": capacity,
                "max_running_requests": backend.max_running_requests,
                "token_usage": load.tokens / capacity,
            }
        ],
    }
