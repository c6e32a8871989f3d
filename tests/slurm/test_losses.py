"""Nodes and daemons lost in the middle of a run: it goes on, its ledger does not change, Slurm gets its nodes back."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from miles_hpc import Run
from tests.slurm.conftest import FIGURES, LONG, SMOKE, Bed, Job, command, figure, first_steps, wait_until

pytestmark = pytest.mark.slurm

SEEN_WITHIN_S = 25.0
GONE_WITHIN_S = 30.0


def finish(bed: Bed, job: Job, lost_at_step: int, undisturbed) -> None:
    """The verdict is there, the ledger equal, steps were committed after the loss, and the job leaves the queue."""
    verdict = wait_until(
        f"the verdict; the job said {job.said()}", lambda: Run(job.run_dir).summary() or None, 240, every_s=0.5
    )
    ended = time.monotonic()
    assert verdict["outcome"] == "finished", verdict["reason"]
    assert job.attempts() == [0], "the run went on in this very allocation"
    assert job.ledger() == first_steps(undisturbed, verdict["steps"])
    assert verdict["steps"] > lost_at_step
    wait_until(f"job {job.id} has left the queue, it is {job.state()}", lambda: not job.in_queue(), 2 * GONE_WITHIN_S)
    figure(f"end of the run -> job {job.accounted()[0]} and gone from squeue", time.monotonic() - ended, GONE_WITHIN_S)
    assert Run(job.run_dir).wait(5)["outcome"] == "finished"
    job.wait_no_process(15)


def lose(bed: Bed, job: Job, node: str, steps: int = 20) -> int:
    job.wait_steps(steps)
    before = job.steps()
    bed.tool("crash", node)
    assert before <= 40, "too late: fewer than 40 steps are left"
    return before


def decided_after(job: Job, event: str) -> float:
    rows = job.events(event)
    assert rows, f"no {event} in hub.jsonl"
    return float(rows[0]["silent_s"])


def test_the_node_of_the_training_incarnation_loses_power(bed: Bed, undisturbed):
    job = bed.submit(*LONG)
    job.wait_steps(2)
    node = job.node_of("driver-00000")
    assert node != "node1", "stateful cells avoid the hub's node"
    before = lose(bed, job, node)
    finish(bed, job, before, undisturbed)
    figure("power-off of a node -> declared dead", decided_after(job, "node_dead"), SEEN_WITHIN_S)


def test_the_first_node_loses_power_with_hub_and_batch_script(bed: Bed, undisturbed):
    job = bed.submit(*LONG)
    before = lose(bed, job, "node1")
    lost_at = time.time()
    finish(bed, job, before, undisturbed)
    claimed = (job.run_dir / "rendezvous" / "0" / "epoch-00002.json").stat().st_mtime
    figure("power-off of the first node -> another node has the hub", claimed - lost_at, SEEN_WITHIN_S)
    assert sorted(path.name for path in (job.run_dir / "rendezvous" / "0").glob("epoch-*")) == [
        "epoch-00001.json",
        "epoch-00002.json",
    ]


def test_a_link_that_is_cut_for_a_minute_splits_no_brain(bed: Bed, undisturbed):
    """The cut-off node's workers are superseded, stopped on return, and commit nothing."""
    job = bed.submit("smoke", "--set", "steps=400", "--set", "train.save_every=10")
    job.wait_steps(2)
    node = job.node_of("driver-00000")
    cut_at = time.monotonic()
    bed.tool("cut", node)
    wait_until("the node counts as dead", lambda: job.events("node_dead"), SEEN_WITHIN_S)
    wait_until("a minute", lambda: time.monotonic() - cut_at > 60, 70)
    bed.tool("join", node)
    joined = time.monotonic()
    inside = [process.pid for process in job.processes() if process.node == node]
    wait_until("the old workers are stopped", lambda: not any(_is_worker(pid) for pid in inside), 30)
    FIGURES.append(f"link back -> superseded workers stopped: {time.monotonic() - joined:.1f} s")
    wait_until("the run goes on", lambda: job.steps() > 20, 120)
    command("scancel", job.id)
    job.wait(60)
    job.wait_no_process(15)
    ledger = job.ledger()
    groups = [row[1] for row in ledger]
    assert len(groups) == len(set(groups)), "nothing is committed twice"
    assert [row for row in ledger if row[0] <= 80] == first_steps(undisturbed, min(80, max(row[0] for row in ledger)))


def _is_worker(pid: int) -> bool:
    try:
        return b"MILES_HPC_WORKER=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_slurmd_started_again_and_slurmctld_away_for_a_minute_do_not_stop_the_run(bed: Bed, undisturbed):
    # At a pace at which the run is not over before.
    job = bed.submit(*SMOKE, "--set", "inference.fake_token_ms=80")
    job.wait_steps(2)
    bed.tool("kill-slurmd", "node2")
    job.wait_steps(job.steps() + 3)
    bed.tool("start-slurmd", "node2")
    bed.tool("kill-slurmctld")
    gone_at, before = time.monotonic(), job.steps()

    def over() -> bool:
        return (job.run_dir / "summary.json").exists()

    try:
        wait_until("a minute", lambda: over() or time.monotonic() - gone_at > 60, 70)
        assert job.steps() > before + 3, "it goes on"
        if over():
            assert Run(job.run_dir).wait(5)["outcome"] == "finished", "the verdict is enough"
    finally:
        bed.tool("start-slurmctld")
    assert job.wait(120) == "COMPLETED", job.said()
    assert job.verdict()["cells"]["healed"] == 0
    assert job.ledger() == first_steps(undisturbed, 40)


def test_a_killed_slurmstepd_takes_its_node_and_hangs_nobody(bed: Bed, undisturbed):
    """Slurm itself would wait for ever: its srun hangs and the job stays RUNNING."""
    job = bed.submit(*LONG)
    job.wait_steps(5)
    node = job.node_of("driver-00000")
    before = job.steps()
    daemon = _stepd(job, node)
    os.kill(daemon, signal.SIGKILL)
    verdict = wait_until("the verdict", lambda: Run(job.run_dir).summary() or None, 240)
    assert verdict["outcome"] in ("finished", "drained"), verdict["reason"]
    assert verdict["steps"] > before or verdict["outcome"] == "drained"
    wait_until("this start of the job has ended", lambda: job.state() != "RUNNING", 60)
    wait_until("no process of that node is left", lambda: not [p for p in job.processes() if p.node == node], 15)


def _stepd(job: Job, node: str) -> int:
    """The slurmstepd of the job's step on a node: the parent of the warden there."""
    (warden,) = (p.pid for p in job.processes() if p.node == node and "warden.py" in p.words)
    status = Path(f"/proc/{warden}/status").read_text()
    return int(next(row.split()[1] for row in status.splitlines() if row.startswith("PPid:")))


def test_after_the_loss_of_one_node_of_one_a_clear_end(bed: Bed):
    """Nothing is left to go on with: Slurm ends the job, and `Run` says what it knows."""
    job = bed.submit(*LONG, options=["--nodes=1"])
    job.wait_steps(2)
    (host,) = {row["host"] for row in json.loads((job.run_dir / "status.json").read_text())["nodes"]}
    bed.tool("crash", host)
    wait_until(f"the job is not running any more, it is {job.state()}", lambda: job.state() != "RUNNING", 90)
    command("scancel", job.id, check=False)
    job.wait(60)
    assert Run(job.run_dir, lost_after_s=10).wait(90)["outcome"] in ("failed", "cancelled", "lost")
