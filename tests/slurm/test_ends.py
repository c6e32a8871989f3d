"""How a job ends: finished, drained and queued again, cancelled; its ledger, its exit code, and what it leaves."""

from __future__ import annotations

import re
import sys
import time

import pytest

from tests.slurm.conftest import (
    FIGURES,
    LONG,
    RL,
    SMOKE,
    Bed,
    command,
    figure,
    first_steps,
    user_environ,
    wait_until,
)

pytestmark = pytest.mark.slurm


def test_the_scripts_are_shell_that_an_admin_can_read():
    for script in RL.parent.glob("*.sbatch"):
        command("bash", "-n", script)
        command("shellcheck", script)
        assert len(script.read_text().splitlines()) <= 25, f"{script} is too long"


def test_a_run_by_sbatch_finishes_and_says_so(bed: Bed):
    job = bed.submit("smoke")
    (joined,) = wait_until("all nodes have joined", lambda: job.events("all_nodes_joined"), 40)
    started = job.step_started()
    figure("step starts -> agents of four nodes hello'd, hub ready", joined["time"] - started, 3)
    assert job.wait(90) == "COMPLETED", job.said()
    assert job.accounted() == ("COMPLETED", "0:0")
    verdict = job.verdict()
    assert (verdict["outcome"], verdict["exit_code"], verdict["steps"], verdict["attempt"]) == ("finished", 0, 20, 0)
    assert verdict["cells"]["healed"] == 0
    assert len(job.events("agent_joined")) == 4
    assert len(job.ledger()) == 160
    job.wait_no_process(1)


@pytest.mark.parametrize("signal", ["USR2", "TERM"])
def test_a_signal_drains_the_run_which_goes_on_in_a_new_start_of_the_job(bed: Bed, undisturbed, signal):
    job = bed.submit(*SMOKE)
    job.wait_steps(10)
    command("scancel", f"--signal={signal}", job.id)
    drained = job.verdict(timeout_s=15)
    assert drained["outcome"] == "drained" and f"SIG{signal}" in drained["reason"], drained["reason"]
    assert "is committed" in drained["reason"], "no worker dies of Slurm's signal before the commit"
    wait_until("the next start", lambda: job.attempts() == [0, 1], 60)
    wait_until("its hub", lambda: job.events("all_nodes_joined", 1), 40)
    started = job.step_started(1)
    wait_until("its first step", lambda: job.steps() > drained["steps"], 60)
    figure(f"requeue by SIG{signal}: Slurm starts the job again -> first step", time.time() - started, 20)
    assert job.wait(120) == "COMPLETED", job.said()
    assert job.attempts() == [0, 1]
    finished = job.verdict(1)
    assert (finished["outcome"], finished["steps"]) == ("finished", 40)
    assert job.ledger() == first_steps(undisturbed, 40)
    assert sorted(path.name for path in (job.run_dir / "logs").iterdir()) == ["attempt-0", "attempt-1", "latest"]
    assert min(row["step"] for row in job.metrics() if row["attempt"] == 1) == drained["steps"] + 1
    job.wait_no_process(1)


def test_requeued_by_an_operator_in_the_middle_it_resumes_from_the_last_commit(bed: Bed, undisturbed):
    place = bed.folder / """it's a "weird" $HOME & place;"""
    place.mkdir()
    job = bed.submit(*SMOKE, "--run-dir", str(place / "run"))
    job.wait_steps(10)
    command("scontrol", "requeue", job.id)
    assert job.wait(150) == "COMPLETED", job.said()
    assert job.attempts() == [0, 1]
    assert job.verdict(1)["outcome"] == "finished"
    assert job.ledger() == first_steps(undisturbed, 40)


def test_cancelled_it_leaves_no_process_and_no_requeue(bed: Bed):
    job = bed.submit(*LONG)
    job.wait_steps(3)
    began = time.monotonic()
    command("scancel", job.id)
    job.wait_no_process(15)
    figure("scancel -> all processes gone", time.monotonic() - began, 15)
    assert job.wait(30) == "CANCELLED"
    assert not list((job.run_dir / "verdicts").glob("*.requeue"))


def test_the_time_limit_is_seen_coming_by_the_hub_s_own_clock(bed: Bed):
    """No signal is asked for, and the limit is shorter than what the run needs: the hub drains by itself."""
    job = bed.submit(
        "smoke", "--set", "steps=4000", "--set", "slurm.drain_margin_s=20", options=["--time=1", "--signal=USR2@0"]
    )
    verdict = job.verdict(timeout_s=90)
    assert verdict["outcome"] == "drained" and "the allocation ends in" in verdict["reason"]
    assert "is committed" in verdict["reason"]
    assert verdict["steps"] > 0
    # It is queued again, and goes on.
    wait_until("attempt 1", lambda: job.attempts() == [0, 1], 60)
    job.wait_steps(verdict["steps"] + 1)
    command("scancel", job.id)
    job.wait_no_process(15)


def test_a_run_that_does_not_get_on_is_not_queued_for_ever(bed: Bed):
    job = bed.submit(
        "smoke", "--set", "train.save_every=1000", "--set", "inference.fake_token_ms=10000", "--set",
        "slurm.max_idle_requeues=2", "--set", "timing.drain=2",
    )  # fmt: skip
    for attempt in range(2):
        wait_until(f"attempt {attempt} is ready", lambda a=attempt: job.events("all_ready", a), 60)
        command("scancel", "--signal=USR2", job.id)
        assert job.verdict(attempt, timeout_s=20)["outcome"] == "drained"
    assert job.wait(30) == "FAILED"
    assert job.accounted() == ("FAILED", "75:0")
    assert job.attempts() == [0, 1]


def test_a_second_job_in_a_live_run_directory_is_refused_with_job_id_and_host(bed: Bed):
    job = bed.submit(*LONG, options=["--nodes=2"])
    job.wait_steps(1)
    again = bed.submit(*SMOKE, "--run-dir", str(job.run_dir), "--resume", options=["--nodes=2"])
    assert again.wait(30) == "FAILED"
    assert again.accounted() == ("FAILED", "2:0")
    assert re.search(rf"runs as job {job.id} on host node\d", again.said()), again.said()
    command("scancel", job.id)
    job.wait_no_process(15)
    job.wait(30)
    fresh = bed.submit(*SMOKE, "--run-dir", str(job.run_dir), options=["--nodes=2"])
    assert fresh.wait(30) == "FAILED" and "--resume" in fresh.said()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch.toml"], "nosuch.toml: no such run file and no recipe of that name"),
        (["smoke", "--set", "rollout.batchsize=3"], "unknown key 'rollout.batchsize': did you mean"),
    ],
)
def test_bad_input_ends_the_job_with_one_line_and_code_2(bed: Bed, arguments, said):
    job = bed.submit(*arguments)
    assert job.wait(30) == "FAILED"
    assert job.accounted() == ("FAILED", "2:0")
    lines = [line for line in job.said().splitlines() if line.startswith("miles-hpc: ")]
    assert len(lines) == 1 and said in lines[0]


def test_a_preempted_run_drains_within_its_grace_time_and_is_queued_again_once(bed: Bed, undisturbed):
    job = bed.submit(*SMOKE)
    job.wait_steps(8)
    script = bed.folder / "other.sh"
    script.write_text("#!/bin/bash\nexec srun --ntasks-per-node=1 sleep 5\n")
    other = bed.submit(script=script, options=["--partition=high", "--nodes=4", "--exclusive"])
    drained = job.verdict(timeout_s=40)
    assert drained["outcome"] == "drained" and "is committed" in drained["reason"], drained["reason"]
    assert other.wait(90) == "COMPLETED"
    assert job.wait(150) == "COMPLETED", job.said()
    assert job.attempts() == [0, 1]
    assert job.verdict(1)["outcome"] == "finished"
    assert job.ledger() == first_steps(undisturbed, 40)


def test_a_run_directory_that_other_nodes_do_not_see_is_named(bed: Bed):
    job = bed.submit("smoke", "--run-dir", "/dev/shm/mh-private", "--set", "timing.join=25", options=["--nodes=2"])
    job.wait(90)
    assert "/dev/shm/mh-private is not seen on node2 after 20 s" in job.said()


def test_an_idle_run_drains_at_once_when_a_user_asks(bed: Bed):
    """Nothing is under way: the trainer that it serves has not come."""
    job = bed.submit("smoke", "--set", "mode=external", options=["--nodes=2"])
    wait_until("all cells are ready", lambda: job.events("all_ready"), 60)
    began = time.monotonic()
    command(sys.executable, "-m", "miles_hpc.cli", "drain", job.run_dir, env=user_environ())
    verdict = job.verdict(timeout_s=20)
    job.wait_no_process(15)
    figure("drain of an idle run -> verdict and all processes gone", time.monotonic() - began, 5)
    assert verdict["outcome"] == "drained"
    assert job.wait(30) == "FAILED" and job.accounted()[1] == "75:0"


def test_a_node_that_never_says_hello_is_named_and_does_not_keep_the_job_open(bed: Bed):
    program = bed.folder / "program"
    program.write_text('#!/bin/bash\n[ "$SLURMD_NODENAME" != node3 ] || exec sleep 600\nexec miles-hpc "$@"\n')
    program.chmod(0o755)
    job = bed.submit("smoke", "--set", "timing.join=5", environ={"MILES_HPC": str(program)})
    verdict = job.verdict(timeout_s=60)
    assert verdict["outcome"] == "failed" and "missing: node-00002 (node3)" in verdict["reason"]
    assert job.wait(40) == "FAILED" and job.accounted()[1] == "1:0"
    job.wait_no_process(15)


def test_the_real_quickstart_learns_on_four_nodes(bed: Bed):
    job = bed.submit("quickstart")
    assert job.wait(500) == "COMPLETED", job.said()
    summary = job.verdict()
    FIGURES.append(f"quickstart on the bed: {summary['seconds']['total']:.0f} s")
    assert summary["outcome"] == "finished" and summary["cells"]["healed"] == 0
    assert summary["heldout"]["first"] <= 0.25 and summary["heldout"]["last"] >= 0.8
    job.wait_no_process(1)
