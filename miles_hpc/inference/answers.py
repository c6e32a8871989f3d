"""What a `/generate` answer holds, checked: ids, log-probs, finish reason and weight versions that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from miles_hpc.inference.engine_api import version_of
from miles_hpc.inference.merging import Answer, AnswerInvalid, Meta, joined

Span = tuple[int, int, int]
"""(weight version, first output token, one past the last)."""


COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
)
"""Numbers of an answer's `meta_info` that add up over requests; the last three are of speculative decoding."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn.

    `seed` makes an engine that honours it a pure function of prompt and seed; `temperature` 0 is greedy; `top_k` -1 is
    no bound.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None

    def payload(self) -> dict[str, Any]:
        """The `sampling_params` of a request."""
        payload: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.stop:
            payload["stop"] = self.stop
        if self.stop_token_ids:
            payload["stop_token_ids"] = self.stop_token_ids
        if self.seed is not None:
            payload["sampling_seed"] = self.seed
        return payload


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Generated tokens: `token_ids` and `logprobs` have one entry each per token, stop token included.

    `weight_versions` covers them without gap.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: list[Span]
    text: str = ""
    stats: dict[str, float] = {}
    """What the engine counted, by the names in `COUNTS`; further ones are left out."""


def parse_answer(events: Sequence[bytes], vocab_size: int) -> Generation:
    """Decode a 200 answer: its body, or of a stream what `Events` kept.

    Raises:
        AnswerInvalid: when ids, log-probs and spans do not fit together, or an id is outside 0..vocab_size-1.
    """
    answer = joined(events)
    meta, ids, reason = answer.meta_info, answer.output_ids, answer.meta_info.reason
    if reason not in ("stop", "length", "abort"):
        raise AnswerInvalid(f"finish_reason.type: expected stop, length or abort, found {reason!r}")
    if reason == "abort":
        return _aborted(answer, vocab_size)
    drawn = meta.output_token_logprobs or []
    if [token for _, token, _ in drawn] != ids:
        raise AnswerInvalid(f"output_ids ({len(ids)}) and output_token_logprobs ({len(drawn)}) name different tokens")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise AnswerInvalid(f"output id {bad} is outside 0..{vocab_size - 1}")
    logprobs = [logprob for logprob, _, _ in drawn if logprob is not None]
    if len(logprobs) != len(ids):
        raise AnswerInvalid(f"{len(ids) - len(logprobs)} of {len(ids)} output tokens have no log-prob")
    return Generation(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        weight_versions=_spans(meta, len(ids)),
        text=answer.text,
        stats=_stats(meta),
    )


def _aborted(answer: Answer, vocab_size: int) -> Generation:
    """What was drawn until the abort: as many tokens as come with a log-prob and a weight version."""
    meta, drawn = answer.meta_info, answer.meta_info.output_token_logprobs or []
    ids, logprobs = [], []
    for token, (logprob, named, _) in zip(answer.output_ids, drawn, strict=False):
        if token != named or logprob is None or not 0 <= token < vocab_size:
            break
        ids.append(token)
        logprobs.append(logprob)
    try:
        spans = _spans(meta, len(answer.output_ids))
    except AnswerInvalid:
        ids, logprobs, spans = [], [], []
    spans = [(version, start, min(end, len(ids))) for version, start, end in spans if start < len(ids)]
    return Generation(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason="abort",
        weight_versions=spans,
        text=answer.text if ids else "",
        stats=_stats(meta),
    )


def _stats(meta: Meta) -> dict[str, float]:
    return {name: value for name in COUNTS if (value := getattr(meta, name)) is not None}


def _spans(meta: Meta, num_tokens: int) -> list[Span]:
    if not meta.weight_versions:
        return [(version_of(meta.weight_version), 0, num_tokens)] if num_tokens else []
    spans = [(version_of(s.version), s.start, s.end) for s in meta.weight_versions if s.end > s.start]
    edges = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != num_tokens:
        raise AnswerInvalid(f"weight_versions {spans} do not cover the {num_tokens} output tokens")
    return spans
