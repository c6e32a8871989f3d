"""The real SGLang and router of tools/sglang-cpu, started by our specs; one pair of engines for the whole session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_hpc.config.load import load

ROOT = Path(__file__).parents[2]
RUN_FILE = Path(__file__).with_name("cpu.toml")
START_S = 900.0
"""A start takes 14 to 27 s on an idle machine, and was seen to take more than 450 s at a load of 45 on two cores."""


def by_path(name: str, path: Path) -> Any:
    """A module of another test directory."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


for name, file in (
    ("engine_contract", "cases"),
    ("stream_contract", "stream_cases"),
    ("weight_contract", "weight_cases"),
):
    by_path(name, Path(__file__).parent / "contract" / f"{file}.py")
FLEET = by_path("sglang_fleet", ROOT / "tests" / "process" / "inference" / "conftest.py")


def sglang_config(*sets: str) -> Any:
    """The run file of these tests with `--set`s; the model's path is filled in by the fleet."""
    return load([RUN_FILE], ["data.prompts=/p.jsonl", "model.path=/m", "inference.request_timeout_s=60", *sets])


class RealFleet(FLEET.Fleet):
    """Real engines under an address book that the test holds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trees: dict[int, list[psutil.Process]] = {}
        """Pid of an engine -> its children, as last seen: some outlive it by seconds."""

    def embedded(self, index: int) -> Any:
        """An embedded engine on the same model, in no address book."""
        ports = {"http": FLEET.free_port()}
        argv = [sys.executable, "-m", "miles_hpc.engine.serve", "--port", str(ports["http"])]
        argv += ["--model-path", self.config.model.path, "--context-length", "1024"]
        program = self._start(f"engine-embedded-0-{index:05d}", 1, ports, argv, {})
        FLEET.wait_http(program, "/health", 120)
        return program

    def wait(self, *engines: Any) -> None:
        """Until these engines answer `/health`."""
        for engine in engines:
            FLEET.wait_http(engine, "/health", START_S)

    def scheduler_of(self, engine: Any) -> psutil.Process:
        """The scheduler process of an engine, by the title that SGLang gives it."""
        known = self.trees.setdefault(engine.process.pid, [])
        if engine.process.poll() is None:
            known[:] = psutil.Process(engine.process.pid).children(recursive=True)
        for child in known:
            if child.is_running() and "scheduler" in " ".join(child.cmdline()):
                return child
        raise AssertionError(f"{engine.cell} has no scheduler process: {known}")

    def end_tree(self, program: Any) -> None:
        """Nothing of a program is left, as when an agent has stopped it."""
        everyone = self.trees.get(program.process.pid, [])
        if program.process.poll() is None:
            everyone = psutil.Process(program.process.pid).children(recursive=True)
            program.process.kill()
        program.process.wait(20)
        for child in everyone:
            if child.is_running():
                child.kill()
        psutil.wait_procs(everyone, 20)

    def stop(self) -> None:
        """End every tree, then the address book."""
        for program in self.programs:
            self.end_tree(program)
        super().stop()


@pytest.fixture(scope="session")
def runtimes() -> Path:
    """Where the runtimes are; without them the layer is not run."""
    found = ROOT / ".runtimes"
    if not (found / "sglang" / "bin" / "python").exists() or not (found / "router" / "bin" / "python").exists():
        pytest.skip("no real SGLang: run tools/sglang-cpu")
    return found


@pytest.fixture(scope="session")
def real_config() -> Callable[..., Any]:
    """`real_config("key=value", …)`: the run file of these tests with `--set`s."""
    return sglang_config


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
        fleet.router_program = fleet.router()
        fleet.engines = [fleet.real_engine(index, wait=False) for index in range(2)]
        fleet.wait(*fleet.engines)
        for engine in fleet.engines:
            fleet.scheduler_of(engine)
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture(scope="session")
def whole_runs() -> Any:
    """The module of whole runs, of the chaos layer."""
    return by_path("sglang_whole_runs", ROOT / "tests" / "chaos" / "conftest.py")
