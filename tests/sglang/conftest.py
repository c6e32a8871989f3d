"""The real SGLang and router of tools/sglang-cpu, started by our specs; one pair of engines for the whole session."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_hpc.config.load import load

ROOT = Path(__file__).parents[2]
RUN_FILE = Path(__file__).with_name("cpu.toml")
START_S = 240.0
"""A start takes 14 to 27 s on an idle machine."""


def by_path(name: str, path: Path) -> Any:
    """A module of another test directory."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


FLEET = by_path("sglang_fleet", ROOT / "tests" / "process" / "inference" / "conftest.py")


def sglang_config(*sets: str) -> Any:
    """The run file of these tests with `--set`s; the model's path is filled in by the fleet."""
    return load([RUN_FILE], ["data.prompts=/p.jsonl", "model.path=/m", "inference.request_timeout_s=60", *sets])


class RealFleet(FLEET.Fleet):
    """Real engines under an address book that the test holds."""

    def wait(self, *engines: Any) -> None:
        """Until these engines answer `/health`."""
        for engine in engines:
            FLEET.wait_http(engine, "/health", START_S)

    def stop(self) -> None:
        """Engines are trees of processes, some of which outlive the first by seconds."""
        trees = [psutil.Process(p.process.pid) for p in self.programs if p.process.poll() is None]
        everyone = [child for tree in trees for child in tree.children(recursive=True)]
        super().stop()
        for child in everyone:
            if child.is_running():
                child.kill()
        psutil.wait_procs(everyone, 20)


def scheduler_of(engine: Any) -> psutil.Process:
    """The scheduler process of an engine's first rank, by the title that SGLang gives it."""
    for child in psutil.Process(engine.process.pid).children(recursive=True):
        if "scheduler" in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"{engine.cell} has no scheduler process")


@pytest.fixture(scope="session")
def runtimes() -> Path:
    """Where the runtimes are; without them the layer is not run."""
    found = ROOT / ".runtimes"
    if not (found / "sglang" / "bin" / "python").exists() or not (found / "router" / "bin" / "python").exists():
        pytest.skip("no real SGLang: run tools/sglang-cpu")
    return found


@pytest.fixture
def make_real_fleet(runtimes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`make_real_fleet("inference.keyed=false", …)`: an empty fleet; what it started ends with the test."""
    fleets: list[Any] = []

    def make(*sets: str) -> Any:
        run_dir = tmp_path / f"run-{len(fleets)}"
        run_dir.mkdir()
        fleets.append(RealFleet(run_dir, config=sglang_config(*sets)))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.stop()


@pytest.fixture(scope="session")
def pair(runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A fleet with router, controller and two engines that serve weights 1; tests leave it serving."""
    run_dir = tmp_path_factory.mktemp("pair")
    fleet = RealFleet(run_dir, config=sglang_config())
    try:
        fleet.controller()
        fleet.router()
        fleet.engines = [fleet.real_engine(index, wait=False) for index in range(2)]
        fleet.wait(*fleet.engines)
        yield fleet
    finally:
        fleet.stop()


def stop_process(process: psutil.Process) -> None:
    """SIGSTOP."""
    os.kill(process.pid, signal.SIGSTOP)
