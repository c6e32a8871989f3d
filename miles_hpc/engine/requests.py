"""What an engine is asked for and what it answers, as plain values; and the protocol that both engines implement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from miles_hpc.engine.chat_tokenizer import ChatTokenizer

PauseMode = Literal["abort", "retract", "in_place"]
TokenLogprob = tuple[float | None, int]
"""Log-probability (natural log; None for the first token of a sequence) and token id."""

MASK64 = (1 << 64) - 1


class BadRequestError(ValueError):
    """The request cannot be served as asked; answered with HTTP 400 and this text."""


def mix64(value: int) -> int:
    """Spread the bits of an integer over 64 bits (the finalizer of splitmix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` -1 is no bound."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the generation, the model's own included unless `ignore_eos` was asked."""
    seed: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, whatever the seed."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position whose log-probability is returned; -1: none."""
    top_logprobs_num: int = 0
    received_at: float = field(default_factory=time.time)


@dataclass(slots=True)
class Result:
    """A finished or aborted sequence, filled while it is generated."""

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens, under softmax(logits / temperature) before top-p and top-k; plain when greedy."""
    output_top: list[list[TokenLogprob]] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top: list[list[TokenLogprob] | None] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """Spans (weight version, first output token, one past the last)."""
    finish: dict[str, Any] = field(default_factory=dict)
    num_retractions: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def produced(self, count: int, version: str) -> None:
        """Account `count` new output tokens to a weight version."""
        end = self.versions[-1][2] if self.versions else 0
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1], end + count)
        elif count:
            self.versions.append((version, end, end + count))


ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Answer to a weight update."""

    success: bool
    message: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a trainer is about to send."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """An engine's place in a weight update group; rank 0, the trainer, listens on `address`."""

    name: str
    address: str
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing now."""

    running: int
    waiting: int
    tokens: int
    """Tokens held by running sequences."""
    alive: bool = True
    paused: bool = False
    seen_at: float = 0.0
    """Wall-clock time of the last sign of the part that computes: fresh when idle or busy, frozen while paused."""
    generated: int = 0
    """Output tokens since the start."""


class Backend(Protocol):
    """An engine behind the HTTP API. Every coroutine is called on the server's event loop."""

    tokenizer: ChatTokenizer
    served_model_name: str
    """Directory that the engine was started with: routers group workers by it, so it outlives weight updates."""
    vocab_size: int
    context_length: int
    max_running_requests: int
    model_config: dict[str, Any]
    kind: str

    @property
    def model_path(self) -> str:
        """Directory of the weights that are served now."""

    @property
    def weight_version(self) -> str:
        """Label of the weights that the next token comes from."""

    async def submit(self, request: Request) -> Result:
        """Generate to the end, or until aborted. Cancelling the call aborts the request."""

    def partial(self, rid: str) -> Result | None:
        """A copy of what a running request has so far; None for one that is not in the engine."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; returns when no further token is made."""

    async def resume(self) -> None:
        """Generate again."""

    async def abort(self, rid: str | None) -> None:
        """End one request, or all with None, each with its partial output."""

    async def flush_cache(self) -> bool:
        """Forget cached keys and values; False when live requests forbid it."""

    async def update_weights_from_disk(
        self, path: str, version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateOutcome:
        """Replace the weights; the old ones keep serving when that fails."""

    async def set_weight_version(self, version: str, *, abort_all: bool) -> None:
        """Change the label only."""

    async def init_group(self, member: GroupMember) -> UpdateOutcome:
        """Join a weight update group; waits for its other members."""

    async def destroy_group(self, name: str) -> UpdateOutcome:
        """Leave a weight update group."""

    async def begin_update(self) -> UpdateOutcome:
        """Open a weight update session."""

    async def end_update(self) -> UpdateOutcome:
        """Close it."""

    async def update_weights_from_group(
        self, group: str, tensors: Sequence[TensorSpec], version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateOutcome:
        """Receive tensors from rank 0 of a group, inside a session; all are received before one is used."""

    async def checksums(self) -> dict[str, str]:
        """Tensor name -> checksum of what is served now."""

    async def answers(self) -> None:
        """Returns as soon as the part that computes has answered."""

    def load(self) -> Load:
        """Running and waiting requests, without waiting for anything."""

    async def failed(self) -> None:
        """Raise when the engine can serve no more; until then, wait."""

    async def close(self) -> None:
        """Abort everything and stop."""


def sample_seed(seed: int | None, index: int) -> int | None:
    """Seed of the `index`-th of n samples of one request: the first has the request's own."""
    return seed if seed is None or index == 0 else mix64(seed ^ mix64(index)) >> 1


def read_model_config(model_path: Path) -> dict[str, Any]:
    """The model's `config.json`, or {} when there is none (then the tokenizer bounds the vocabulary)."""
    path = model_path / "config.json"
    if not path.is_file():
        return {}
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return config


def context_length_of(config: dict[str, Any], default: int = 4096) -> int:
    """Longest sequence that a model's config admits."""
    source: Sequence[Any] = (config, config.get("text_config") or {})
    for table in source:
        for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(table.get(key), int):
                return int(table[key])
    return default
