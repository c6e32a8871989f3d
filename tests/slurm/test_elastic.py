"""More nodes for a living run, from a second job, and their end."""

from __future__ import annotations

import json

import pytest

from tests.slurm.conftest import JOIN, Bed, Job, command, first_steps, wait_until

pytestmark = pytest.mark.slurm


def status(job: Job) -> dict:
    return json.loads((job.run_dir / "status.json").read_text())


def engines(job: Job, state: str = "ready") -> list[dict]:
    return [cell for cell in status(job)["cells"] if cell["pool"].startswith("engine") and cell["state"] == state]


def test_engines_of_a_second_job_take_traffic_and_its_end_loses_no_prompt(bed: Bed, undisturbed):
    job = bed.submit("smoke", "--set", "steps=400", "--set", "train.save_every=10", options=["--nodes=2"])
    job.wait_steps(2)
    assert len(engines(job)) == 2
    guests = bed.submit(str(job.run_dir), script=JOIN, options=["--nodes=2"])
    wait_until("two more engines are ready", lambda: len(engines(job)) == 4, 60)
    assert {cell["node"] for cell in engines(job)} >= {"node-00002", "node-00003"}
    before = job.steps()
    job.wait_steps(before + 10)
    command("scancel", guests.id)
    guests.wait(60)
    wait_until("their engines are gone", lambda: len(engines(job)) == 2 and len(engines(job, "stopped")) == 2, 60)
    before = job.steps()
    job.wait_steps(before + 5)
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
