"""Tiny real models: random Qwen2 weights under a byte-level tokenizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


def make_model_dir(path: Path, seed: int, **changes: Any) -> Path:
    """Write a model directory: 2 layers, hidden 64, 512 ids, random fp32 weights from `seed`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the answer is 12 + 34 = 46", "user assistant system question"] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # wide logits: a step's log-probs differ, and so do tokens of different weights
    }
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes})).float().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with different weights."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("torch and transformers are not installed (extra `train`)")
    base = tmp_path_factory.mktemp("models")
    return [make_model_dir(base / f"model-{seed}", seed) for seed in (0, 1)]
