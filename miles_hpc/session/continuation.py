"""Token in, token out: only what comes after the stored tokens of a conversation is tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_hpc.engine.chat_tokenizer import ChatTemplateError, ChatTokenizer
from miles_hpc.session.errors import InvalidRequest, TemplateNotAppendable

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

# Text that no template treats in a special way, found again in what it rendered.
_MARK = "CONTENT7CONTENT"
_BASE: tuple[Message, ...] = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": _MARK})


class Continuation:
    """Tokens of a first prompt, and of what a template puts between a generated answer and the next one."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The whole prompt of a first turn.

        Raises:
            InvalidRequest: when the template refuses the messages.
        """
        try:
            return self._tokenizer.render(messages, True, tools=tools)
        except ChatTemplateError as error:
            raise InvalidRequest(str(error)) from error

    def suffix(self, generated: Sequence[int], new: Sequence[Message], tools: Tools = None) -> list[int]:
        """The tokens to put after `generated`, the tokens of the last answer, to go on with the messages `new`.

        They are taken from a short conversation in place of the real one: its answer is text that tokenises as it
        likes, while the real answer's tokens stay as they were drawn. A stop token that was drawn is not repeated.

        Raises:
            InvalidRequest: when the template refuses the messages.
            TemplateNotAppendable: when it does not render `new` after what it rendered before.
        """
        try:
            before = self._tokenizer.render_text(_BASE, False, tools=tools)
            after = self._tokenizer.render_text([*_BASE, *new], True, tools=tools)
        except ChatTemplateError as error:
            raise InvalidRequest(str(error)) from error
        end = before.rfind(_MARK)
        if end < 0 or not after.startswith(before):
            where = self._tokenizer.model_dir
            raise TemplateNotAppendable(
                f"the chat template of {where} changes earlier messages when a conversation goes on: "
                f"set model.chat_template to one that only appends"
            )
        end += len(_MARK)
        closing = self._tokenizer.encode(before[end:])
        ids = self._tokenizer.encode(after[end:])
        for size in range(min(len(closing), len(generated)), 0, -1):
            if list(generated[-size:]) == ids[:size]:
                return ids[size:]
        return ids
