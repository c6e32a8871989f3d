"""Text and chat to token ids and back, with `tokenizers` and `jinja2` only: no torch, no transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


def _byte_of() -> dict[str, int]:
    # Byte-level BPE writes printable Latin-1 bytes as themselves and the others, in order, from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of()


class ModelDirError(ValueError):
    """A model directory lacks something that chat needs; the text is one line with file and remedy."""


class ChatTemplateError(ValueError):
    """A chat template refused the given messages."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is passed through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    # The settings and extras that published templates are written for; they come with a model, hence a sandbox.
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDirError(f"{path}: not readable as JSON ({error}); copy the file again from the model") from error
    if not isinstance(data, dict):
        raise ModelDirError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


class ChatTokenizer:
    """The tokenizer and chat template of a HF model directory.

    Args:
        model_dir: holds `tokenizer.json`, and a chat template in `tokenizer_config.json`, `chat_template.jinja` or
            `chat_template.json`. `config.json` and `generation_config.json` are read for `vocab_size` and stop ids.
        chat_template: path of a template file that replaces the model's own; empty: the model's.
        require_template: False lets a model without a chat template load; `render` then raises.

    Raises:
        ModelDirError: when a file is missing or broken.
    """

    def __init__(self, model_dir: Path | str, chat_template: str = "", *, require_template: bool = True) -> None:
        self.model_dir = Path(model_dir)
        if not self.model_dir.is_dir():
            raise ModelDirError(f"{self.model_dir}: no such model directory; set model.path to a HF model directory")
        path = self.model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelDirError(
                f"{path}: missing; save the model's fast tokenizer there (tokenizer.save_pretrained writes it)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelDirError(f"{path}: not a tokenizer ({error}); save the model's fast tokenizer again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_json(self.model_dir / "tokenizer_config.json")
        self._special = self._special_tokens()
        self._env = _environment()
        source, where = self._template_source(chat_template)
        if source is None and require_template:
            raise ModelDirError(
                f"{self.model_dir}: no chat template in tokenizer_config.json, chat_template.jinja or "
                f"chat_template.json; add one, or set model.chat_template"
            )
        try:
            self._template = None if source is None else self._env.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelDirError(f"{where}: chat template does not compile ({error})") from error
        # `Template.render` gathers these anew each time, which takes longer than a short template itself.
        self._always = {} if self._template is None else {**self._template.globals, **self._special}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size = self._vocab_size()
        self.stop_token_ids = self._stop_token_ids()

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token, if the model has one."""
        return self._special.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if the model has one."""
        token = self.eos_token
        return None if token is None else self._tokenizer.token_to_id(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ChatTemplateError: when the template refuses the messages.
        """
        return self.encode(self.render_text(messages, add_generation_prompt, tools=tools, **kwargs))

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text that `render` tokenises; raises ChatTemplateError as it does."""
        if self._template is None:
            raise ChatTemplateError(f"{self.model_dir} has no chat template; set model.chat_template")
        try:
            names = {
                **self._always,
                **kwargs,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            text: str = self._env.concat(
                self._template.root_render_func(self._template.new_context(names, shared=True))
            )
            return text
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template of {self.model_dir} refused the messages: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised, none are added unless asked."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know are left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones included."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a byte-level tokenizer's may be a part of a character."""
        token = self._tokenizer.id_to_token(token_id)
        if token is not None and type(self._tokenizer.decoder).__name__ == "ByteLevel":
            found = [_BYTE_OF.get(char) for char in token]
            if None not in found:
                return bytes(byte for byte in found if byte is not None)
        return self.token_text(token_id).encode("utf-8")

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact name in the vocabulary, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _special_tokens(self) -> dict[str, str]:
        merged = {**_read_json(self.model_dir / "special_tokens_map.json"), **self._config}
        texts = {name: _token_text(merged.get(name)) for name in _SPECIAL_NAMES}
        return {name: text for name, text in texts.items() if text is not None}

    def _template_source(self, override: str) -> tuple[str | None, Path]:
        if override:
            path = Path(override)
            try:
                return path.read_text(encoding="utf-8"), path
            except OSError as error:
                raise ModelDirError(
                    f"{path}: chat template not readable ({error}); correct model.chat_template"
                ) from error
        path = self.model_dir / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8"), path
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = self.model_dir / name
            template = _read_json(path).get("chat_template")
            if isinstance(template, list):  # several named templates: `default` is the chat one
                named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
                template = named.get("default")
            if isinstance(template, str) and template:
                return template, path
        return None, self.model_dir

    def _vocab_size(self) -> int:
        # The model's rows bound the ids that may be sent; they are often padded beyond the tokenizer's.
        config = _read_json(self.model_dir / "config.json")
        text_config = config.get("text_config")
        size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, Mapping) else None)
        return int(size) if size else int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def _stop_token_ids(self) -> list[int]:
        found: list[int] = [] if self.eos_token_id is None else [self.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.model_dir / name).get("eos_token_id")
            found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        return list(dict.fromkeys(found))
