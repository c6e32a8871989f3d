"""One session's account: messages, and for each token where it came from. No I/O, no clock of its own."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.inference.answers import Generation, SamplingParams, Span
from miles_hpc.session.continuation import Continuation
from miles_hpc.session.errors import HistoryDiverged, InvalidRequest, NoTurns
from miles_hpc.session.mismatch import mismatches

MSGPACK = "application/msgpack"
"""Content type of samples between our own programs."""
_COMPARED = ("role", "content", "name", "tool_calls", "tool_call_id")
_ROLES_TO_APPEND = ("user", "system", "tool", "developer")


class TurnInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A generated answer: tokens `start` to `end` of the session."""

    start: int
    end: int
    finish_reason: str


class SessionSample(msgspec.Struct, frozen=True, kw_only=True):
    """A session as training data; `token_ids`, `loss_mask` and `logprobs` have one entry per token.

    `loss_mask` is 1 on generated tokens only; `logprobs` is 0.0 elsewhere; `weight_versions` are spans over `token_ids`
    that cover exactly the generated tokens.
    """

    session_id: str
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weight_versions: list[Span]
    messages: list[dict[str, Any]]
    turns: list[TurnInfo]
    stats: dict[str, float] = {}
    """What the engines counted, added up over the turns; see `inference.answers.COUNTS`."""
    mismatches: list[str] | None = None
    """How the tokens differ from the rendered messages, see `session.mismatch`; None: not compared."""

    @property
    def finish_reason(self) -> str:
        """Of the last turn."""
        return self.turns[-1].finish_reason

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        return self.turns[0].start


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request that was read and found servable."""

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    tools: list[dict[str, Any]] | None = None

    def key(self) -> bytes:
        """Equal for equal requests: a repeated one gets the answer of the first."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


@dataclass
class Session:
    """What is kept of a session. `last_used` is on the owner's monotonic clock."""

    id: str
    last_used: float
    messages: list[dict[str, Any]] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    spans: list[Span] = field(default_factory=list)
    turns: list[TurnInfo] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    last_key: bytes = b""
    last_answer: dict[str, Any] | None = None
    running: tuple[bytes, asyncio.Task[dict[str, Any]]] | None = None
    closed: bool = False

    def next_prompt(self, request: ChatRequest, continuation: Continuation) -> list[int]:
        """The tokens to generate after: the stored ones as they are, then the tokens of the new messages.

        Raises:
            HistoryDiverged: when the request does not begin with the session's messages.
            InvalidRequest: when nothing, or an answer that was not generated here, is appended.
        """
        if not self.turns:
            return continuation.prompt(request.messages, request.tools)
        known = len(self.messages)
        for position, (ours, theirs) in enumerate(zip(self.messages, request.messages, strict=False)):
            if identity(ours) != identity(theirs):
                raise HistoryDiverged(
                    f"messages[{position}] is not the one of session {self.id}: expected {_shown(ours)}, "
                    f"found {_shown(theirs)}; a session only grows, begin another one"
                )
        new = request.messages[known:]
        if not new:
            raise HistoryDiverged(
                f"the request holds {len(request.messages)} messages, session {self.id} has {known}: "
                f"append at least one to the history, answers included"
            )
        for position, message in enumerate(new, known):
            if message["role"] not in _ROLES_TO_APPEND:
                raise InvalidRequest(
                    f"messages[{position}] has role {message['role']!r}, but only {', '.join(_ROLES_TO_APPEND)} "
                    f"can be appended: answers are generated here"
                )
        last = self.turns[-1]
        generated = self.token_ids[last.start : last.end].tolist()
        return self.token_ids.tolist() + continuation.suffix(generated, new, request.tools)

    def record(self, request: ChatRequest, prompt: Sequence[int], generation: Generation) -> TurnInfo:
        """Add a generated answer; `prompt` is what `next_prompt` gave for the request."""
        added = len(prompt) - len(self.token_ids)
        self.token_ids.extend(prompt[len(self.token_ids) :])
        self.loss_mask.extend(bytes(added))
        self.logprobs.extend([0.0] * added)
        start = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.loss_mask.extend(b"\x01" * len(generation.token_ids))
        self.logprobs.extend(generation.logprobs)
        self.spans += [(version, start + first, start + end) for version, first, end in generation.weight_versions]
        turn = TurnInfo(start=start, end=len(self.token_ids), finish_reason=generation.finish_reason)
        self.turns.append(turn)
        self.tools = request.tools
        for name, value in generation.stats.items():
            self.stats[name] = self.stats.get(name, 0.0) + value
        self.messages = [*request.messages, {"role": "assistant", "content": generation.text}]
        self.last_key = request.key()
        return turn

    def sample(self, tokenizer: ChatTokenizer | None = None) -> SessionSample:
        """The session as training data; with a tokenizer its tokens are compared with its messages.

        Raises:
            NoTurns: when nothing was generated.
        """
        if not self.turns:
            raise NoTurns(f"session {self.id} has no generated turn")
        return SessionSample(
            session_id=self.id,
            token_ids=self.token_ids.tolist(),
            loss_mask=list(self.loss_mask),
            logprobs=self.logprobs.tolist(),
            weight_versions=list(self.spans),
            messages=list(self.messages),
            turns=list(self.turns),
            stats=dict(self.stats),
            mismatches=None
            if tokenizer is None
            else mismatches(tokenizer, self.token_ids, self.loss_mask, self.messages, self.tools),
        )


def identity(message: dict[str, Any]) -> dict[str, Any]:
    """What two messages are compared by: clients add fields of their own, and write a text in two ways."""
    compared = {key: message[key] for key in _COMPARED if message.get(key) is not None}
    compared["content"] = text_of(message)
    return compared


def text_of(message: dict[str, Any]) -> str:
    """The content as one text; a list of text parts is joined.

    Raises:
        InvalidRequest: for content that is no text.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise InvalidRequest(f"content of a {message.get('role')} message is neither a text nor a list of text parts")


def _shown(message: dict[str, Any]) -> str:
    text = text_of(message)
    return f"{message['role']}: {text if len(text) <= 60 else text[:60] + '…'!r}"
