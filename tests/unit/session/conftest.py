"""A tiny tokenizer with the quickstart's kind of template, and a generator that needs no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.inference.answers import Generation, SamplingParams
from miles_hpc.session.requests import ChatDefaults

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Drops earlier answers, as some reasoning models' templates do with their thoughts.
FORGETFUL = "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}|{% endfor %}"


def build(directory: Path, template: str) -> ChatTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system hello there hello"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer(directory)


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[[str], ChatTokenizer]:
    templates = {"chatml": CHATML, "plain": PLAIN, "forgetful": FORGETFUL}
    return lambda name="chatml": build(tmp_path, templates[name])


class ScriptedGenerate:
    """Stands where GenerateClient stands: answers are a pure function of prompt and seed."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingParams] = []
        self.keys: list[str | None] = []
        self.reason = "stop"
        self.version = 3
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None

    def text(self, prompt: list[int], seed: int | None) -> str:
        return f"answer {(sum(prompt) + (seed or 0)) % 97}"

    async def generate(self, input_ids: list[int], sampling: SamplingParams, **rest: Any) -> Generation:
        self.prompts.append(list(input_ids))
        self.samplings.append(sampling)
        self.keys.append(rest.get("routing_key"))
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        text = self.text(list(input_ids), sampling.seed)
        # One token per byte: text that the tokenizer itself would have merged into fewer.
        ids = [self.tokenizer.encode(letter)[0] for letter in text]
        if self.reason == "stop":
            ids.append(self.tokenizer.stop_token_ids[0])
        return Generation(
            token_ids=ids,
            logprobs=[-0.1 * (i + 1) for i in range(len(ids))],
            finish_reason=self.reason,  # type: ignore[arg-type]
            weight_versions=[(self.version, 0, len(ids))],
            text=text,
        )


@pytest.fixture
def scripted() -> type[ScriptedGenerate]:
    return ScriptedGenerate


@pytest.fixture
def defaults() -> ChatDefaults:
    return ChatDefaults(max_tokens=16, temperature=1.0, top_p=1.0, top_k=-1, timeout_s=10.0, stop_token_ids=[0])
