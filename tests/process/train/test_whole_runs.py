"""The recipes as users start them: killed in the middle and resumed, failing, and learning."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.process

COMMAND = [sys.executable, "-m", "miles_hpc.cli", "run"]
SMOKE_S, QUICKSTART_S, GONE_S = 120, 420, 30


@pytest.fixture
def runs(tmp_path):
    """Starts runs in one directory, which end with the test."""
    made = Runs(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


class Runs:
    def __init__(self, path):
        self.path = path
        self.started = []

    def start(self, recipe, name, *words):
        process = subprocess.Popen(
            [*COMMAND, recipe, "--run-dir", str(self.path / name), *words],
            cwd=self.path,
            env={**os.environ, "XDG_STATE_HOME": str(self.path / "state"), "TERM": "dumb"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, recipe, name, *words, timeout=SMOKE_S, code=0):
        process = self.start(recipe, name, *words)
        out, _ = process.communicate(timeout=timeout)
        assert process.returncode == code, out
        return out

    def rows(self, name, file):
        path = self.path / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self, name):
        return json.loads((self.path / name / "summary.json").read_text())

    def wait_for_step(self, name, step):
        deadline = time.monotonic() + SMOKE_S
        while not any(row["step"] >= step for row in self.rows(name, "metrics.jsonl")):
            assert time.monotonic() < deadline, f"step {step} did not come"
            assert self.started[-1].poll() is None, self.started[-1].stdout.read()
            time.sleep(0.02)

    def wait_until_gone(self, name):
        """Until no process has the run directory in its environment or its arguments."""
        run_dir = str(self.path / name)
        deadline = time.monotonic() + GONE_S
        while left := [process for process in psutil.process_iter() if run_dir in _words(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def _words(process):
    with contextlib.suppress(psutil.Error):
        return " ".join([*process.cmdline(), process.environ().get("MILES_HPC_RUN_DIR", "")])
    return ""


def ledger(runs, name):
    keys = ("step", "group", "prompt_index", "epoch", "samples", "digest")
    return [tuple(line[key] for key in keys) for line in runs.rows(name, "ledger.jsonl")]


def test_a_command_that_was_killed_twice_is_resumed_to_an_equal_ledger(runs):
    runs.finish("smoke", "undisturbed")
    whole = ledger(runs, "undisturbed")
    assert len(whole) == 20 * 8 and len({line[1] for line in whole}) == len(whole)
    version = 0
    for attempt, step in enumerate((7, 14)):
        process = runs.start("smoke", "killed", *(["--resume"] if attempt else []))
        runs.wait_for_step("killed", step)
        process.kill()
        process.communicate()
        runs.wait_until_gone("killed")
        newest = max(row["weight_version"] for row in runs.rows("killed", "metrics.jsonl"))
        assert newest > version
        version = newest
    runs.finish("smoke", "killed", "--resume")
    assert ledger(runs, "killed") == whole
    last = runs.rows("killed", "metrics.jsonl")[-1]
    assert (last["step"], last["attempt"]) == (20, 2) and last["weight_version"] > version
    groups = runs.summary("killed")["groups"]
    assert groups["committed"] == len(whole)
    assert groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())


def test_a_finished_run_leaves_what_is_promised(runs):
    out = runs.finish("smoke", "done", "--set", "steps=3", "--set", "train.save_every=2")
    assert "finished after 3 steps" in out
    directory = runs.path / "done"
    summary = runs.summary("done")
    assert (summary["outcome"], summary["steps"], summary["weight_version"]) == ("finished", 3, 4)
    assert summary["groups"] == {"dispatched": 24, "committed": 24, "returned": 0, "dropped": {}}
    assert [path.name for path in sorted((directory / "checkpoints").iterdir())] == ["00002.g1-1", "00003.g1-1"]
    versions = sorted(path.name for path in (directory / "weights").iterdir() if path.is_dir())
    assert versions == ["00003", "00004"]
    assert [row["step"] for row in runs.rows("done", "metrics.jsonl")] == [1, 2, 3]
    again = runs.finish("smoke", "done", "--resume", "--set", "steps=5")
    assert "finished after 5 steps" in again
    assert [line[0] for line in ledger(runs, "done")] == [step for step in range(1, 6) for _ in range(8)]


def test_an_exception_in_the_driver_is_the_reason_of_the_run(runs):
    (runs.path / "own_rewards.py").write_text("def broken(sample):\n    raise ValueError('no reward today')\n")
    out = runs.finish("smoke", "wrong", "--set", "reward.function=own_rewards:broken", code=1)
    last = out.strip().splitlines()[-1]
    assert "no reward today" in last and "--resume" in last
    assert runs.summary("wrong")["outcome"] == "failed"
    runs.wait_until_gone("wrong")


def test_the_quickstart_learns(runs):
    out = runs.finish("quickstart", "learning", timeout=QUICKSTART_S)
    summary = runs.summary("learning")
    assert summary["heldout"]["first"] <= 0.25, out
    assert summary["heldout"]["last"] >= 0.8, out
    assert max(row["logprob_gap"] for row in runs.rows("learning", "metrics.jsonl")) <= 1e-4
    assert (runs.path / "learning" / "checkpoints" / "00048.g1-1" / "model.safetensors").is_file()
