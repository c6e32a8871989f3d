"""Programs of a test, written beside it and killed at its end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_hpc.wire.ids import Generation
from miles_hpc.wire.security import create_secrets
from miles_hpc.wire.worker_env import WorkerEnv


class Program:
    """A Python process; `line()` waits for what it prints."""

    def __init__(self, script: Path, arguments: list[str]) -> None:
        command = [sys.executable, "-u", str(script), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    create_secrets(tmp_path, 1)
    return tmp_path


@pytest.fixture
def worker_env(run_dir: Path) -> WorkerEnv:
    return WorkerEnv(
        run_dir=run_dir,
        attempt=1,
        worker="driver-00000-00000",
        pool="driver",
        cell_index=0,
        worker_index=0,
        generation=Generation(1, 1),
        node="node-00000",
        listen={},
        master={},
        cell_size=1,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """start(source, *arguments) -> Program"""
    programs: list[Program] = []

    def run(source: str, *arguments: object) -> Program:
        script = tmp_path / f"program-{len(programs)}.py"
        script.write_text(textwrap.dedent(source))
        programs.append(Program(script, [str(argument) for argument in arguments]))
        return programs[-1]

    yield run
    for program in programs:
        if program.process.poll() is None:
            program.kill()
        assert program.process.stdout is not None
        program.process.stdout.close()
