"""More nodes for a living run, from a second job, and their end."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.slurm.conftest import JOIN, Bed, Job, command, first_steps, wait_until

pytestmark = pytest.mark.slurm


def status(job: Job) -> dict:
    return json.loads((job.run_dir / "status.json").read_text())


def engines(job: Job, state: str = "ready") -> list[dict]:
    return [cell for cell in status(job)["cells"] if cell["pool"].startswith("engine") and cell["state"] == state]


def guests_of(job: Job) -> dict[str, tuple[str, str]]:
    """Ready engines on nodes of other jobs: cell -> (node, generation)."""
    return {
        cell["cell"]: (cell["node"], str(cell["generation"])) for cell in engines(job) if cell["node"] > "node-00001"
    }


def test_engines_of_other_jobs_take_traffic_outlive_the_hub_and_go_without_losing_a_prompt(bed: Bed, undisturbed):
    job = bed.submit(
        "smoke", "--set", "steps=400", "--set", "train.save_every=10", options=["--nodes=2", "--nodelist=node1,node2"]
    )
    job.wait_steps(2)
    assert len(engines(job)) == 2
    first, second = (
        bed.submit(str(job.run_dir), script=JOIN, options=[f"--nodelist={node}"]) for node in ("node3", "node4")
    )
    wait_until("two more engines are ready", lambda: len(engines(job)) == 4, 60)
    before = guests_of(job)
    assert {node for node, _ in before.values()} == {"node-00002", "node-00003"}
    job.wait_steps(job.steps() + 5)
    # A hub that is started again knows nothing of them but what their agents say.
    (hub,) = (process.pid for process in job.processes() if "miles_hpc.cli.hub" in process.words)
    os.kill(hub, signal.SIGKILL)
    wait_until("the next hub has taken over", lambda: job.events("recovered"), 30)
    wait_until("every engine is ready again", lambda: status(job)["epoch"] == 2 and len(engines(job)) == 4, 30)
    job.wait_steps(job.steps() + 5)
    assert guests_of(job) == before, "started by nobody a second time"
    # One job is cancelled, the other one preempted.
    command("scancel", first.id)
    other = bed.folder / "other.sh"
    other.write_text("#!/bin/bash\nexec sleep 1\n")
    bed.submit(script=other, options=["--partition=high", "--nodelist=node4", "--exclusive"])
    first.wait(60)
    second.wait(60)
    wait_until("their engines are gone", lambda: len(engines(job)) == 2 and len(engines(job, "stopped")) == 2, 60)
    job.wait_steps(job.steps() + 5)
    command("scancel", job.id)
    job.wait(60)
    job.wait_no_process(15)
    verdict = job.verdict()
    assert verdict["outcome"] == "drained", verdict["reason"]
    ledger = job.ledger()
    last = max(row[0] for row in ledger)
    assert first_steps(ledger, 80) == first_steps(undisturbed, min(last, 80)), "no prompt lost, none counted twice"
    assert job.attempts() == [0]


def test_a_run_that_has_ended_cannot_be_joined(bed: Bed):
    job = bed.submit("smoke", "--set", "steps=2", options=["--nodes=2"])
    assert job.wait(90) == "COMPLETED", job.said()
    guests = bed.submit(str(job.run_dir), script=JOIN)
    assert guests.wait(40) == "FAILED"
    assert "attempt 0 has ended: only a run that is going on can be joined" in guests.said()
