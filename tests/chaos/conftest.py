"""Whole runs of `smoke`, started as a user would, looked at through the operator's link and hurt by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from miles_hpc.agent import procfs
from miles_hpc.wire.messages import CellRow, StatusReply
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.sockets import HubError

T = TypeVar("T")
PATIENCE_S = 90.0
# A third of a second a step at the least, on any machine: a run must still be there when it is hurt.
PACE_KEY = "inference.fake_token_ms"
PACE = f"{PACE_KEY}=60"


def wait_for(
    condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S, *, pause_s: float = 0.05
) -> T:
    """Poll the outside world until it says something other than None or False."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(pause_s)


class WholeRun:
    """A run in a directory, as an operator sees it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._rows_before = len(self.metrics())

    def alive(self) -> bool:
        """Whether the run may still get further."""
        raise NotImplementedError

    def tail(self) -> str:
        """For the messages of a test that fails."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ looking
    def status(self) -> StatusReply | None:
        """What the hub says; None while none answers."""
        try:
            with OperatorClient(self.run_dir, timeout_s=2.0) as operator:
                return operator.status()
        except (HubError, OSError):
            return None

    def cell(self, name: str) -> CellRow | None:
        found = self.status()
        return None if found is None else next((row for row in found.cells if row.cell == name), None)

    def pid(self, worker: str, other_than: int = 0) -> int:
        """Of a worker that runs; waits for it, and for another process than the one given."""
        cell, _, index = worker.rpartition("-")

        def running() -> int | None:
            assert self.alive(), f"the run ended before {worker} ran; {self.tail()}"
            row = self.cell(cell)
            alive = row is not None and row.state in ("starting", "ready") and len(row.workers) > int(index)
            found = row.workers[int(index)].pid if alive and row is not None else 0
            return found if found not in (0, other_than) else None

        return wait_for(running, f"{worker} to run")

    def pids(self, pool: str) -> dict[str, list[int]]:
        """Cell -> pids, of a pool whose cells are all ready."""

        def all_ready() -> dict[str, list[int]] | None:
            assert self.alive(), f"the run ended before all of {pool} were ready; {self.tail()}"
            found = self.status()
            rows = [row for row in found.cells if row.pool == pool] if found is not None else []
            if not rows or any(row.state != "ready" for row in rows):
                return None
            return {row.cell: [worker.pid for worker in row.workers] for row in rows}

        return wait_for(all_ready, f"all of {pool} to be ready")

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, those of earlier attempts too."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def step(self) -> int:
        """Last step that was made since this command was started."""
        rows = self.metrics()[self._rows_before :]
        return int(rows[-1]["step"]) if rows else 0

    def reach(self, step: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait for a step; fails at once when the run ends before it."""

        def there() -> bool:
            assert self.alive() or self.step() >= step, self.tail()
            return self.step() >= step

        wait_for(there, f"step {step}", timeout_s)

    def hub_of_epoch(self, epoch: int, timeout_s: float = 30.0) -> StatusReply:
        """Wait until a hub of this epoch, or a later one, answers."""

        def answers() -> StatusReply | None:
            assert self.alive(), f"the run ended before a hub of epoch {epoch} answered; {self.tail()}"
            found = self.status()
            return found if found is not None and found.epoch >= epoch else None

        return wait_for(answers, f"a hub of epoch {epoch}", timeout_s)

    def hub_pid(self) -> int:
        return self.process_of("hub")

    def process_of(self, name: str, node: str = "") -> int:
        """The first process of a worker, the hub or an agent, by its marker; a direct child of its agent."""

        def found() -> int | None:
            assert self.alive(), f"the run ended before there was a process of {name}; {self.tail()}"
            prefix = f"{self.run_id}/0/{node}"
            for process in procfs.marked(procfs.snapshot(), prefix, str(self.run_dir)):
                mark, _ = procfs.mark_of(process.pid)
                if f"/{name}/" in mark:
                    return process.pid
            return None

        return wait_for(found, f"the process of {name}")

    @property
    def run_id(self) -> str:
        def claimed() -> str | None:
            try:
                return str(json.loads((self.run_dir / "attempts" / "0.json").read_text())["run_id"])
            except (FileNotFoundError, KeyError, json.JSONDecodeError):
                return None

        return wait_for(claimed, "the attempt")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the hubs' log with this event."""
        lines = (self.run_dir / "logs" / "attempt-0" / "hub.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def ledger(self) -> list[tuple[Any, ...]]:
        """What two equal runs have in common, in order."""
        keys = ("step", "group", "prompt_index", "epoch", "samples", "digest")
        return sorted(tuple(line[key] for key in keys) for line in self.ledger_lines())

    def ledger_lines(self) -> list[dict[str, Any]]:
        """Everything that the ledger says."""
        return [json.loads(line) for line in (self.run_dir / "ledger.jsonl").read_text().splitlines()]

    def left(self) -> list[str]:
        """Living processes that carry the run's marker."""
        found = procfs.marked(procfs.snapshot(), f"{self.run_id}/", str(self.run_dir))
        return [f"{process.pid} {procfs.command_line(process.pid)}" for process in found]

    def last_line(self) -> str:
        """What the command said last."""
        return self.output.read_text(errors="replace").rstrip().rpartition("\n")[2]

    # ------------------------------------------------------------------------------------------ hurting
    def kill(self, worker: str, number: int = signal.SIGKILL) -> int:
        pid = self.pid(worker)
        os.kill(pid, number)
        return pid


class SmokeRun(WholeRun):
    """One `miles-hpc run smoke`, in a process of its own; with `resume` the next attempt of one that has ended.

    `files` are laid over smoke. A run keeps a pace unless `sets` name their own.
    """

    def __init__(self, run_dir: Path, *sets: str, resume: bool = False, files: tuple[str, ...] = ()) -> None:
        super().__init__(run_dir)
        words = [sys.executable, "-m", "miles_hpc.cli", "run", "smoke", *files, "--run-dir", str(run_dir)]
        for text in (PACE, *sets):
            words += ["--set", text]
        words += ["--resume"] if resume else []
        self.output = run_dir.with_suffix(".out")
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]

    def end(self, timeout_s: float = 150.0) -> dict[str, Any]:
        """Wait for the end; returns the summary."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s:g} s; {self.tail()}") from None
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        procfs.kill_all(procfs.marked(procfs.snapshot(), f"{self.run_dir.name}/", str(self.run_dir)))


@pytest.fixture
def smoke(tmp_path: Path) -> Iterator[Callable[..., SmokeRun]]:
    """Starts runs of `smoke`; what is left of them is gone after the test."""
    runs: list[SmokeRun] = []

    def start(*sets: str, name: str = "run", resume: bool = False) -> SmokeRun:
        runs.append(SmokeRun(tmp_path / name, *sets, resume=resume))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[Any, ...]]]:
    """The ledger of a run that nobody hurts, made once per settings, at full speed: a pace changes no ledger."""
    known: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}

    def ledger(*settings: str) -> list[tuple[Any, ...]]:
        sets = tuple(text for text in settings if not text.startswith(f"{PACE_KEY}="))
        if sets not in known:
            run = SmokeRun(tmp_path_factory.mktemp("undisturbed") / "run", *sets, f"{PACE_KEY}=0")
            try:
                assert run.end()["outcome"] == "finished", run.tail()
                known[sets] = run.ledger()
            finally:
                run.close()
        return known[sets]

    return ledger
