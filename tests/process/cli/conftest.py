from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.train.make_model import make_model

COMMAND = [sys.executable, "-m", "miles_hpc.cli"]


@dataclass
class Workplace:
    """A directory with a run file that is fine, and a registry of its own."""

    path: Path

    @property
    def run_dir(self) -> Path:
        return self.path / "run"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.path / "state"), "TERM": "dumb"}

    def write(self, name: str, text: str) -> Path:
        (self.path / name).write_text(text)
        return self.path / name

    def call(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.path,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return self.call("run", "my.toml", "--run-dir", str(self.run_dir), *words, timeout=timeout)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def workplace(tmp_path, model_dir) -> Workplace:
    place = Workplace(tmp_path)
    rows = [{"prompt": f"What is {number} + {number}?", "label": str(2 * number)} for number in range(32)]
    place.write("prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    place.write(
        "my.toml",
        f"""
steps = 2
model.path = "{model_dir}"
data.prompts = "prompts.jsonl"
train.trainer = "hash"
inference.engine = "fake"
[cluster]
local_nodes = 2
""",
    )
    return place
