"""The files of an HF model directory that do not change in training."""

from __future__ import annotations

import shutil
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX = ".index.json"


def copy_model_files(source: Path, target: Path, chat_template: str = "") -> list[Path]:
    """Copy config, tokenizer, template and code files of a model, but no weights; returns what was written.

    Args:
        chat_template: file that replaces the model's own template; empty: the model's.
    """
    written = []
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name.endswith((*_WEIGHTS, _INDEX)):
            continue
        written.append(Path(shutil.copyfile(path, target / path.name)))
    if chat_template:
        template = target / "chat_template.jinja"
        shutil.copyfile(chat_template, template)
        written = [*(path for path in written if path != template), template]
    return written
