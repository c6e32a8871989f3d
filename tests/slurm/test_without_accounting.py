"""A cluster without accounting, and with proctrack/cgroup where the machine has the freezer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc import Run, State, submit
from tests.slurm.conftest import LONG, Bed, Job, command, wait_until

pytestmark = pytest.mark.slurm

FREEZER = Path("/sys/fs/cgroup/freezer")
HAS_CGROUPS = FREEZER.is_dir() and os.access(FREEZER, os.W_OK)


@pytest.fixture(scope="module")
def bare(cluster: Bed) -> Iterator[Bed]:
    track = ["--conf", "ProctrackType=proctrack/cgroup"] if HAS_CGROUPS else []
    cluster.up("--nodes", "2", "--no-accounting", *track)
    yield cluster
    cluster.clean()


def test_without_accounting_a_run_is_followed_to_its_end_and_one_that_dies_hard_is_not_waited_for(bare: Bed, tmp_path):
    bare.folder = tmp_path
    run = submit("smoke", run_dir=tmp_path / "run", nodes=2, cpus_per_node=4, sets=["steps=3"])
    bare.adopt(Job(run.job_id, run.run_dir))
    assert run.wait(90)["outcome"] == "finished"
    assert "disabled" in command("bash", "-c", f"sacct -j {run.job_id} 2>&1 || true")
    run = submit(
        "smoke", run_dir=tmp_path / "hard", nodes=2, cpus_per_node=4, sets=[*LONG[2::2], "inference.fake_token_ms=50"]
    )
    job = bare.adopt(Job(run.job_id, run.run_dir))
    run.wait_ready(60)
    job.kill_agents()
    found = Run(run.run_dir, settle_s=3).wait(90)
    assert found["outcome"] == State.FAILED.value and "has left no verdict" in found["reason"], found
    job.wait_no_process(15)


@pytest.mark.skipif(not HAS_CGROUPS, reason="no control group for proctrack/cgroup can be made here")
def test_with_proctrack_cgroup_no_process_is_left_either(bare: Bed, tmp_path):
    bare.folder = tmp_path
    pace = ("--set", "inference.fake_token_ms=50")
    cancelled, beheaded = (bare.submit(*LONG, *pace, options=["--nodes=1", "--cpus-per-task=4"]) for _ in range(2))
    for job in (cancelled, beheaded):
        wait_until(f"all cells are ready; {job.said()}", lambda job=job: job.events("all_ready"), 90)
        assert list(FREEZER.glob(f"slurm_node*/**/job_{job.id}")), "Slurm follows the job by its control group"
    command("scancel", cancelled.id)
    beheaded.kill_agents()
    for job in (cancelled, beheaded):
        wait_until("the job has ended", lambda job=job: not job.in_queue(), 60)
        job.wait_no_process(15)
