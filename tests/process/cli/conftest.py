from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.train.make_model import make_model

STUB = Path(__file__).with_name("stub.py")
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


@pytest.fixture
def place(workplace):
    """The workplace with stubs for all programs."""
    python = workplace.write(
        "stub-python", f'#!/bin/sh\n[ "$1" = -m ] && set -- {STUB} "$@"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    with (workplace.path / "my.toml").open("a") as file:
        file.write(f'[runtimes.default]\npython = "{python}"\n[timing]\nprobe_interval = 0.2\nstatus_interval = 0.1\n')
    return workplace


def marked(run_dir: Path) -> list[str]:
    """Living processes that carry the run's directory in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MILES_HPC_RUN_DIR") == str(run_dir) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.cmdline()}")
        except psutil.Error:
            continue
    return found


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def stubbed(place, script: str, *words: str):
    env = {**place.env, "STUB_DRIVER": script}
    return subprocess.run(
        [*COMMAND, "run", "my.toml", "--run-dir", str(place.run_dir), *words],
        cwd=place.path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def running(place, script: str = "wait") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "run", "my.toml", "--run-dir", str(place.run_dir)],
        cwd=place.path,
        env={**place.env, "STUB_DRIVER": script},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: (place.run_dir / "driver-waits").exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        yield process
    finally:
        process.kill()
        process.wait()
        until(lambda: not marked(place.run_dir))
