"""The events of a streamed `/generate` answer, put together in either of SGLang's forms.

Cumulative: an event holds the whole answer so far, which is quadratic traffic. Incremental
(`--incremental-streaming-output`): it holds the text, ids and log-probs that are new. No header says which, but
`output_token_logprobs_length` counts the log-probs of the whole answer so far in both: once some came, an event cannot
have as many as it counts and fewer by what came before. (SGLang 0.5.23, read and seen.) A stream without that count is
taken for a cumulative one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

LogprobRow = tuple[float | None, int, Any]
"""Log-probability, token id, text."""


class AnswerInvalid(ValueError):
    """An answer that does not fit together; the text says which part."""


class SpanOnWire(msgspec.Struct):
    """Output tokens of one weight version."""

    version: str | int
    start: int
    end: int


class Meta(msgspec.Struct):
    """What is used of `meta_info`."""

    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[LogprobRow] | None = None
    output_token_logprobs_length: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[SpanOnWire] | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    cached_tokens: float | None = None
    spec_num_correct_drafts: float | None = None
    spec_num_proposed_drafts: float | None = None
    spec_verify_ct: float | None = None

    @property
    def reason(self) -> Any:
        """Type of the finish reason; None while it goes on."""
        return (self.finish_reason or {}).get("type")


class Answer(msgspec.Struct):
    """A whole answer, or one event of it."""

    meta_info: Meta
    output_ids: list[int]
    text: str = ""


class _Counts(msgspec.Struct):
    output_token_logprobs: list[msgspec.Raw] | None = None
    output_token_logprobs_length: int | None = None


class _Glance(msgspec.Struct):
    meta_info: _Counts


class Events:
    """What is needed of the events of one stream: all of an incremental one, the last of a cumulative one."""

    __slots__ = ("_incremental", "needed")

    def __init__(self) -> None:
        self.needed: list[bytes] = []
        """Bodies of the events, in their order."""
        self._incremental: bool | None = None

    def take(self, event: bytes) -> None:
        """The next event has come."""
        if self.needed and self._incremental is None:
            self._incremental = _continues(self.needed[0], event)
        if self._incremental:
            self.needed.append(event)
        else:
            self.needed[:] = [event]


def _continues(first: bytes, second: bytes) -> bool | None:
    """Whether the second event of a stream holds only what is new; None: the first one had no tokens to tell by."""
    try:
        before, after = (msgspec.json.decode(event, type=_Glance).meta_info for event in (first, second))
    except msgspec.MsgspecError:
        return False  # whatever it is, it is looked at as it stands
    had, new = len(before.output_token_logprobs or ()), len(after.output_token_logprobs or ())
    total = after.output_token_logprobs_length
    if not had:
        return None
    # More than it counts: see `_told_again`.
    return total is not None and (had + new == total or new > total)


def joined(events: Sequence[bytes]) -> Answer:
    """The answer that `Events.needed` make, or a body that is no stream's.

    Raises:
        AnswerInvalid: when an event is no answer, or does not continue those before it.
    """
    if not events:
        raise AnswerInvalid("a stream without any event")
    ids: list[int] = []
    rows: list[LogprobRow] = []
    text = ""
    for event in events:
        try:
            answer = msgspec.json.decode(event, type=Answer)
        except msgspec.MsgspecError as error:
            raise AnswerInvalid(f"not a /generate answer: {error}") from error
        meta, new = answer.meta_info, answer.meta_info.output_token_logprobs or []
        total = meta.output_token_logprobs_length
        if meta.reason == "abort" and (told_again := _told_again(answer, rows, text)):
            rows, text = told_again
            ids = [token for _, token, _ in rows]
        elif len(rows) + len(new) == total or (len(events) == 1 and total is None):
            ids += answer.output_ids
            rows += new
            text += answer.text
        else:
            raise AnswerInvalid(f"an event has {len(new)} tokens after {len(rows)}, and counts {total} in all")
    answer.output_ids, meta.output_token_logprobs, answer.text = ids, rows, text
    return answer


def _told_again(abort: Answer, rows: list[LogprobRow], text: str) -> tuple[list[LogprobRow], str] | None:
    """The whole of a request that was aborted while it waited, retracted ones included; None for any other event.

    In the incremental form SGLang (0.5.23) ends such a one with all log-probs and all text, but of the ids only the
    last. What was still to be sent stands before that in the same event.
    """
    new, total = abort.meta_info.output_token_logprobs or [], abort.meta_info.output_token_logprobs_length
    if not total or len(new) < total:
        return None
    unsent, whole = new[: len(new) - total], new[len(new) - total :]
    if abort.output_ids != [token for _, token, _ in (*unsent, whole[-1])]:
        return None
    if not unsent:
        return (whole, abort.text) if whole[: len(rows)] == rows else None
    # The text is the unsent part, then the part that was sent and the unsent one again.
    whole_text = abort.text[(len(abort.text) - len(text)) // 2 :]
    return (whole, whole_text) if rows + unsent == whole and whole_text.startswith(text) else None
