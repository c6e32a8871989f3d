"""A tiny model from nothing: config, weights, trained tokenizer and chat template, without torch.

The weights are drawn with numpy, so that making a model costs neither the import of torch nor its memory, and the same
seed gives the same bytes everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_hpc.config.schema import MakeModelConfig

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MAX_POSITIONS = 2048
_VOCAB_SIZE = 384
# A narrow model on short texts: wider first weights than the usual 0.02 and a small rotary base, with which near
# positions are told apart easily, let it learn to copy digits within a few hundred steps.
_INIT_STD = 0.06
_ROPE_THETA = 100.0

# What the tokenizer learns its merges from. Digits never merge (each is a token of its own), so that a number is
# something a small model can copy and compare.
_CORPUS = [
    "Write 1 backwards.",
    "Reverse the digits of the number 1.",
    "Are you sure? Answer again.",
    "You are a helpful assistant. Answer with the number only.",
    "What is the sum of the numbers? What is the answer to the question?",
]


def make_model(make: MakeModelConfig, seed: int, out: Path) -> Path:
    """Write an HF model directory of a small Llama to `out` and return it.

    Raises:
        ValueError: when the width does not divide by the heads.
        FileExistsError: when `out` holds a model already.
    """
    if make.hidden_size % (2 * make.heads):
        raise ValueError(
            f"model.make.hidden_size {make.hidden_size} must be a multiple of 2 x model.make.heads ({make.heads}): "
            "change either"
        )
    if (out / "config.json").exists():
        raise FileExistsError(f"{out} already holds a model; choose another directory or remove it")
    out.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(out)
    config = _llama_config(make, vocab_size)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"eos_token_id": [1], "pad_token_id": 0})
    _write_weights(out, config, seed)
    return out


def _write_tokenizer(out: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        min_frequency=1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return int(tokenizer.get_vocab_size())


def _llama_config(make: MakeModelConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": make.hidden_size,
        "intermediate_size": 4 * make.hidden_size,
        "num_hidden_layers": make.layers,
        "num_attention_heads": make.heads,
        "num_key_value_heads": make.heads,
        "head_dim": make.hidden_size // make.heads,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": _ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": _INIT_STD,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "use_cache": True,
        "torch_dtype": "float32",
    }


def _write_weights(out: Path, config: dict[str, Any], seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]

    def drawn(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(0.0, _INIT_STD, shape).astype(np.float32)

    ones = np.ones(hidden, np.float32)
    weights = {"model.embed_tokens.weight": drawn(vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = drawn(hidden, hidden)
        weights[f"{layer}.mlp.gate_proj.weight"] = drawn(inner, hidden)
        weights[f"{layer}.mlp.up_proj.weight"] = drawn(inner, hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = drawn(hidden, inner)
        weights[f"{layer}.input_layernorm.weight"] = ones.copy()
        weights[f"{layer}.post_attention_layernorm.weight"] = ones.copy()
    weights["model.norm.weight"] = ones
    weights["lm_head.weight"] = drawn(vocab, hidden)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
