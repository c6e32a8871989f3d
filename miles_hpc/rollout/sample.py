"""A sample and the group of samples that belong to one prompt."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import msgspec

Status = Literal["pending", "completed", "truncated", "aborted", "failed"]
Messages = list[dict[str, Any]]


class PartialSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample had when its group was interrupted; it goes on from there. Readable in commits."""

    index: int
    status: Status
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    versions: list[tuple[int, int, int]] = []
    response: str = ""
    reward: float | None = None
    """Of a finished sample; it is not asked for again, unless its group is scored as a whole."""
    category: str = ""
    stats: dict[str, float] = {}
    """What was counted until then; the rest is added."""

    @classmethod
    def of(cls, sample: Sample) -> PartialSample:
        """The state of a sample. One with arrays of `extra`, which cannot be kept here, begins anew.

        Numbers that are not finite cannot be kept either: JSON, in which commits are written, has no word for them.
        """
        if sample.extra or not all(map(math.isfinite, sample.logprobs)):
            return cls(index=sample.index, status="pending")
        # Plain numbers: those of numpy cannot be sent.
        return cls(
            index=sample.index,
            status=sample.status,
            token_ids=[int(token) for token in sample.token_ids],
            loss_mask=[int(counts) for counts in sample.loss_mask],
            logprobs=[float(logprob) for logprob in sample.logprobs],
            versions=[(int(version), int(start), int(end)) for version, start, end in sample.versions],
            response=sample.response,
            reward=None if sample.reward is None else float(sample.reward),
            category=str(sample.category),
            stats={name: float(value) for name, value in sample.stats.items() if math.isfinite(value)},
        )

    def restore(self, sample: Sample, *, mask: bool) -> None:
        """Bring a fresh sample to this state.

        Args:
            mask: these tokens come from an older policy and shall not count.
        """
        sample.status = self.status if self.status in ("completed", "truncated") else "pending"
        sample.token_ids = list(self.token_ids)
        sample.loss_mask = [0] * len(self.loss_mask) if mask else list(self.loss_mask)
        sample.logprobs = list(self.logprobs)
        sample.versions = list(self.versions)
        sample.response = self.response
        sample.stats = dict(self.stats)
        if sample.status != "pending":
            sample.reward, sample.category = self.reward, self.category


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt at one place of the data order. The id is a function of epoch and index, so it names the same work in
    every attempt, and ids sort in data order."""

    id: str
    epoch: int
    index: int
    """Place in the epoch's order."""
    prompt_index: int
    """Row of the data set."""
    partial: list[PartialSample] = []
    """What its samples have already, after an interruption."""


class Sample(msgspec.Struct, kw_only=True):
    """What generate and reward functions work on.

    A generate function fills `token_ids` (prompt and response), `loss_mask`, `logprobs` and `versions` (weight version,
    first token, end token) over the same positions, `response` (the text that is scored) and `status`.
    """

    group: str
    index: int
    """Which sample of its group."""
    prompt_index: int
    epoch: int
    prompt: str | Messages
    """The prompt as the data file has it: a text, or chat messages."""
    seed: int
    """Sampling seed; equal in every attempt."""
    label: Any = None
    metadata: dict[str, Any] = {}
    weight_version: int = 0
    """Version that was current when the group was dispatched."""
    evaluation: bool = False
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    versions: list[tuple[int, int, int]] = []
    response: str = ""
    status: Status = "pending"
    reward: float | None = None
    tools: list[dict[str, Any]] = []
    """Tools that the chat template shows, from `data.tools_key`."""
    extra: dict[str, Any] = {}
    """Further per-token arrays, `[tokens, ...]`, e.g. routed experts int32; numpy, the same names in every sample."""
    stats: dict[str, float] = {}
    """Numbers that add up over samples; their means are metrics of the step."""
    category: str = ""
    """A word that the reward function sorted the answer under; the share of each is a metric of the step."""

    def reset(self, seed: int) -> None:
        """Forget what was generated, to begin again with another seed."""
        self.seed = seed
        self.token_ids, self.loss_mask, self.logprobs, self.versions = [], [], [], []
        self.response, self.status, self.reward, self.extra, self.stats = "", "pending", None, {}, {}

    def messages(self) -> Messages:
        """The prompt as chat messages; a text is one message of the user."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)


def group_id(epoch: int, index: int) -> str:
    """`e00000-i000000042`: data epoch, and place in that epoch's order. Ids sort as text in data order."""
    return f"e{epoch:05d}-i{index:09d}"


def parse_group_id(name: str) -> tuple[int, int]:
    """Data epoch and place of a `group_id`.

    Raises:
        ValueError: it is none.
    """
    epoch, _, index = name.partition("-i")
    return int(epoch.removeprefix("e")), int(index)


def readable(text: str) -> str:
    """The text; half characters, which no encoding can write, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sample_seed(run_seed: int, epoch: int, prompt_index: int, sample_index: int) -> int:
    """Sampling seed in 0 … 2^31 - 1: a pure function, so that a healed run draws the same tokens."""
    text = f"{run_seed}/{epoch}/{prompt_index}/{sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF
