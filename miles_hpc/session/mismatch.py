"""Whether a session's tokens are what its messages would render to: token in, token out must not drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_hpc.engine.chat_tokenizer import ChatTemplateError, ChatTokenizer

KINDS = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")
"""The first three are bugs of template or bookkeeping; the last happens when an answer was drawn in other tokens."""


def mismatches(
    tokenizer: ChatTokenizer,
    token_ids: Sequence[int],
    loss_mask: Sequence[int],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[str]:
    """Compare a session's tokens with the rendering of its messages; returns which of `KINDS` differ.

    Both are cut at special tokens. White space at the very end does not count: a drawn answer ends with its stop token,
    a rendered one may have a line break behind it. Nor does the stop token that an answer at its limit lacks.
    """
    try:
        canonical = tokenizer.render(messages, False, tools=tools)
    except ChatTemplateError:
        return [KINDS[1]]
    ours, texts, drawn = _cut(tokenizer, token_ids, loss_mask)
    theirs, canonical_texts, _ = _cut(tokenizer, canonical, bytes(len(canonical)))
    if len(theirs) == len(ours) + 1 and not canonical_texts[-1] and loss_mask[-1]:
        del theirs[-1], canonical_texts[-1]
    if len(ours) != len(theirs):
        return [KINDS[0]]
    if ours != theirs:
        return [KINDS[1]]
    found = {
        KINDS[3] if by_policy else KINDS[2]
        for text, other, by_policy in zip(texts, canonical_texts, drawn, strict=True)
        if text != other
    }
    return sorted(found, key=KINDS.index)


def _cut(tokenizer: ChatTokenizer, ids: Sequence[int], mask: Sequence[int]) -> tuple[list[int], list[str], list[bool]]:
    """Special tokens in order, the texts between them, and whether the policy drew a token of each text."""
    special = tokenizer.special_ids
    marks, starts = [], [0]
    for place, token in enumerate(ids):
        if token in special:
            marks.append(token)
            starts.append(place + 1)
    ends = [start - 1 for start in starts[1:]] + [len(ids)]
    texts = [tokenizer.decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    texts[-1] = texts[-1].rstrip()
    # The stop token that ends an answer belongs to the text before it; a text without tokens was drawn if that was.
    drawn = [any(mask[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
    return marks, texts, drawn
