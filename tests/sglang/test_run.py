"""Whole runs on the real SGLang, started as a user would, under the real hub and agents."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.train.make_model import make_model
from miles_hpc.wire.security import load_http_key

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]

COMMON = (
    "steps=4",
    "model.make.hidden_size=64",
    "model.make.heads=4",
    "train.trainer=torch",
    "train.learning_rate=0.0001",
    "train.save_every=2",
    "rollout.batch_size=4",
    "eval.limit=8",
    "session.servers=1",
    # This machine may be busy: a step of a scheduler that takes longer is not a death.
    "inference.stall_s=180",
)


@pytest.fixture
def real_run(runtimes: Path, tmp_path: Path, whole_runs: Any) -> Iterator[Callable[..., Any]]:
    """`real_run("key=value", …)`: a run of smoke with the real SGLang."""
    runs: list[Any] = []

    def start(*sets: str) -> Any:
        files = (str(Path(__file__).with_name("cpu.toml")),)
        runs.append(whole_runs.SmokeRun(tmp_path / f"run-{len(runs)}", *COMMON, *sets, files=files))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def finished(run: Any, timeout_s: float = 1500.0) -> dict[str, Any]:
    summary = run.end(timeout_s)
    assert (run.process.returncode, summary["outcome"]) == (0, "finished"), run.tail()
    assert run.left() == []
    lines = [json.loads(line) for line in (run.run_dir / "ledger.jsonl").read_text().splitlines()]
    versions = [version for line in lines for version in line["weight_versions"]]
    assert lines and all(int(version) >= 1 for version in versions)
    key = load_http_key(run.run_dir, 0)
    for log in (run.run_dir / "logs").rglob("*.log"):
        assert key not in log.read_text(errors="replace"), log
    return summary


def starts(run: Any, worker: str) -> list[str]:
    """The generations in which the agents have started a worker."""
    logs = sorted((run.run_dir / "logs" / "attempt-0").glob("node-*/agent.jsonl"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [line["generation"] for line in lines if line["event"] == "worker_started" and line["worker"] == worker]


def test_a_run_trains_on_what_the_real_engines_draw_and_replaces_one_whose_scheduler_dies(real_run):
    run = real_run("inference.engines=1", "train.ranks=1", "cluster.local_nodes=1")
    run.reach(1, 1500)
    engine = psutil.Process(run.pid("engine-policy-0-00000-00000"))
    (scheduler,) = (child for child in engine.children() if "sglang::scheduler" in " ".join(child.cmdline()))
    os.kill(scheduler.pid, signal.SIGKILL)
    killed_at = time.time()
    summary = finished(run)
    assert summary["steps"] == 4 and summary["cells"]["healed"] >= 1
    (lost,) = (line for line in run.events("worker_exited") if "process_lost" in line["how"])
    assert f"its process sglang::scheduler (pid {scheduler.pid}), without which it cannot go on" in lost["how"]
    print(f"the hub knew {lost['time'] - killed_at:.1f} s after the scheduler's death")


def test_an_engine_over_two_nodes_loses_each_of_its_ranks_and_the_run_goes_on_with_broadcast_weights(real_run):
    run = real_run(
        "steps=8",
        "inference.engines=1",
        "inference.nodes_per_engine=2",
        "runtimes.engine.env.SGLANG_CPU_OMP_THREADS_BIND=0|1",
        "train.ranks=1",
        "train.weight_transfer=distributed",
    )
    ranks = ["engine-policy-0-00000-00001", "engine-policy-0-00000-00000"]
    for step, rank in zip((1, 3), ranks, strict=True):
        run.reach(step, 1500)
        os.kill(run.pid(rank), signal.SIGKILL)
    summary = finished(run)
    assert summary["cells"]["healed"] >= 2
    assert run.metrics()[-1]["step"] == 8
    first, second = (starts(run, rank) for rank in ranks)
    assert first == second and len(first) >= 3


def test_an_engine_that_dies_at_load_ends_the_run_with_its_error_and_the_likely_cause(real_run, tmp_path):
    model = make_model(MakeModelConfig(), 0, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    run = real_run(
        *("model.make=none", f"model.path={model}", "inference.engines=1", "train.ranks=1"),
        *("cluster.local_nodes=1", "heal.budget=0"),
    )
    summary = run.end(600)
    assert (run.process.returncode, summary["outcome"]) == (1, "failed"), run.tail()
    reason = summary["reason"]
    assert "engine-policy-0-00000" in reason and "NoSuchForCausalLM" in reason, reason
    assert "likely cause: the model's architecture is unknown to this engine" in reason
    assert reason.replace("\n", " ") == reason and run.left() == []
