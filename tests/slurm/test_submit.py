"""`miles-hpc submit`, `miles_hpc.submit` and `Run`, used as a user would, from the command line and from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc import Run, State, submit
from miles_hpc.config.errors import ConfigError
from tests.slurm.conftest import LONG, SMOKE, Bed, Job, command, figure, first_steps, user_environ

pytestmark = pytest.mark.slurm


def miles_hpc(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "miles_hpc.cli", *arguments],
        cwd=cwd, env=user_environ(**environ), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def queued() -> list[str]:
    return command("squeue", "-h", "-o", "%i").split()


def python(code: str, cwd: Path, **environ: str) -> str:
    return command(sys.executable, "-c", code, cwd=cwd, env=user_environ(**environ), timeout_s=200)


def test_submitted_from_python_a_run_in_a_weird_directory_is_ready_drained_and_goes_on(bed: Bed, tmp_path, undisturbed):
    place = tmp_path / 'it\'s a "weird" $HOME & place;'
    place.mkdir()
    started = time.monotonic()
    run = submit("smoke", run_dir=place / "run", nodes=4, cpus_per_node=4, sets=SMOKE[2::2], signal_s=30, time="10")
    figure("miles_hpc.submit returns", time.monotonic() - started, 2)
    job = Job(run.job_id, run.run_dir)
    bed.adopt(job)
    run.wait_ready(60)
    assert (run.state, run.attempt) == (State.RUNNING, 0)
    job.wait_steps(8)
    # Another process, later, by the directory alone.
    said = python(f"import miles_hpc; print(miles_hpc.Run({str(run.run_dir)!r}).state.value)", tmp_path)
    assert said.strip() == "running"
    # USR2 through submitit's path: one requeue, by the hub's word, and none by submitit's own handler.
    command("scancel", "--signal=USR2", run.job_id)
    summary = run.wait(150)
    assert (summary["outcome"], summary["attempt"], summary["steps"]) == ("finished", 1, 40), summary
    assert job.attempts() == [0, 1]
    assert job.ledger() == first_steps(undisturbed, 40)
    assert job.accounted() == ("COMPLETED", "0:0")
    assert "run run, attempt 1" in run.logs() or "attempt 1" in run.logs(lines=500)
    assert run.logs("driver")


def test_the_command_submits_drains_and_refuses_a_second_submit(bed: Bed, tmp_path):
    done = miles_hpc("submit", *LONG, "--nodes", "2", "--cpus-per-node", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    job = Job(found["job_id"], Path(found["run_dir"]))
    bed.adopt(job)
    run = Run(job.run_dir)
    run.wait_ready(60)
    again = miles_hpc("submit", *LONG, "--run-dir", str(job.run_dir), "--resume", cwd=tmp_path)
    assert again.returncode == 2 and f"runs as job {job.id}" in again.stderr
    job.wait_steps(2)
    started = time.monotonic()
    drained = miles_hpc("drain", str(job.run_dir), "--wait", "--reason", "lunch", cwd=tmp_path)
    assert drained.returncode == 0 and drained.stdout.startswith("drained: lunch; step"), drained.stdout
    assert time.monotonic() - started < 20
    assert run.standing().state is State.DRAINED
    assert job.wait(30) == "FAILED" and job.accounted()[1] == "75:0"
    assert not list((job.run_dir / "verdicts").glob("*.requeue")), "nobody asked for a requeue"
    job.wait_no_process(5)


def test_cancelled_before_and_after_its_start(bed: Bed, tmp_path):
    run = submit(
        "smoke", run_dir=tmp_path / "waits", nodes=2, cpus_per_node=4, slurm_additional_parameters={"hold": True}
    )
    bed.adopt(Job(run.job_id, run.run_dir))
    assert run.state is State.PENDING
    run.cancel()
    assert run.wait(30)["outcome"] == "cancelled"
    run = submit("smoke", run_dir=tmp_path / "runs", nodes=2, cpus_per_node=4, sets=LONG[2::2])
    job = bed.adopt(Job(run.job_id, run.run_dir))
    run.wait_ready(60)
    # From another process, later, by the directory alone.
    python(f"import miles_hpc; miles_hpc.Run({str(run.run_dir)!r}).cancel('enough')", tmp_path)
    summary = run.wait(60)
    assert (summary["outcome"], summary["reason"]) == ("cancelled", "enough")
    job.wait_no_process(15)
    assert job.wait(30) == "FAILED"
    assert "ExitCode=130:0" in command("scontrol", "show", "job", job.id)
    assert job.accounted()[1] == "2:0", "sacct takes 128 off: what the docs say about it still holds"
    assert (job.run_dir / "verdicts" / f"{job.id}.0.rc").read_text().strip() == "130"


def test_submitting_from_inside_a_job_takes_nothing_of_it_along(bed: Bed, tmp_path):
    """An outer step's CPU binding or GPU count would slow down or break every node of the new job."""
    leaky = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_GPUS_PER_NODE": "7", "SLURM_MEM_PER_CPU": "1", "PMI_RANK": "3",
        "SBATCH_PARTITION": "nosuch", "SLURM_NTASKS_PER_NODE": "9",
    }  # fmt: skip
    code = (
        "import miles_hpc, os\n"
        "r = miles_hpc.submit('smoke', run_dir='run', nodes=2, cpus_per_node=4, sets=['steps=3'])\n"
        "assert os.environ['SLURM_GPUS_PER_NODE'] == '7'; print(r.wait(90)['outcome'])"
    )
    script = tmp_path / "outer.sh"
    exports = "\n".join(f"export {name}={value}" for name, value in leaky.items())
    script.write_text(f"#!/bin/bash\n{exports}\n{sys.executable} - <<'END'\n{code}\nEND\n")
    outer = bed.submit(script=script, options=["--nodes=1", "--cpus-per-task=1"])
    assert outer.wait(120) == "COMPLETED", outer.said()
    assert outer.said().strip().endswith("finished"), outer.said()
    for line in (tmp_path / "run" / "logs" / "latest").glob("*/agent.jsonl"):
        assert '"cpus":1' not in line.read_text().split("\n")[0]


GPUS_TOO_MANY = "needs 8 GPUs (1 workers x 8) in one contiguous run of free slots; free: node-00000 4 of 4"
EIGHT_GPUS = (
    *("--set", "inference.engine=sglang", "--set", "inference.gpus_per_engine=8"),
    *("--set", "train.trainer=torch"),  # the hash trainer writes nothing that SGLang could load
)

BAD = [
    (["--partition", "nosuch"], "Slurm refused the job: invalid partition specified: nosuch"),
    (["--nodes", "5"], "Slurm refused the job: "),
    (["--gpus-per-node", "9"], "Slurm refused the job: "),
    (["--account", "nosuch"], "Slurm refused the job: Batch job submission failed: Invalid account"),
    (["--time", "soon"], 'slurm.time = "soon": expected minutes'),
    (["--set", "slurm.additional={nodes=3}"], "slurm.additional.nodes is decided by the run: set slurm.nodes instead"),
    (["--run-dir", "/dev/shm/mh-run"], "lies on tmpfs, which other nodes do not see"),
    ([*EIGHT_GPUS, "--gpus-per-node", "4"], GPUS_TOO_MANY),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[" ".join(options[:2]) for options, _ in BAD])
def test_what_cannot_work_is_one_line_and_leaves_nothing_queued(bed: Bed, tmp_path, options, said):
    extra = [] if "--nodes" in options else ["--nodes", "2"]
    done = miles_hpc("submit", "smoke", *extra, "--cpus-per-node", "4", *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and said in done.stderr, done.stderr
    assert queued() == []


def test_without_slurm_the_command_says_so_and_offers_run(tmp_path):
    # No bed: what is looked at is this process's PATH alone.
    (tmp_path / "bin").mkdir()
    done = miles_hpc("submit", "smoke", cwd=tmp_path, PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    assert "sbatch was not found in PATH" in done.stderr and "miles-hpc run" in done.stderr


def test_a_dry_run_prints_script_config_and_placement_and_submits_nothing(bed: Bed, tmp_path):
    done = miles_hpc("submit", "smoke", "--nodes", "3", "--cpus-per-node", "4", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=3" in done.stdout and "--kill-on-bad-exit=0" in done.stdout
    assert "[slurm]" in done.stdout and "# placement" in done.stdout and "node-00002" in done.stdout
    assert queued() == [] and not (tmp_path / "runs").exists()


def test_many_runs_are_watched_by_one_question(bed: Bed, tmp_path):
    """A shim in front of squeue counts: login nodes are shared, and slurmctld has limits."""
    shims = tmp_path / "bin"
    shims.mkdir()
    log = tmp_path / "calls"
    real = command("which", "squeue").strip()
    (shims / "squeue").write_text(f'#!/bin/sh\necho "$*" >>{log}\nexec {real} "$@"\n')
    (shims / "squeue").chmod(0o755)
    runs = [
        submit(
            "smoke", run_dir=tmp_path / f"r{i}", nodes=1, cpus_per_node=4, slurm_additional_parameters={"hold": True}
        )
        for i in range(6)
    ]
    for run in runs:
        bed.adopt(Job(run.job_id, run.run_dir))
    code = (
        "import miles_hpc, time, sys\n"
        "runs = [miles_hpc.Run(d) for d in sys.argv[1:]]\n"
        "end = time.monotonic() + 7\n"
        "while time.monotonic() < end:\n"
        "    assert all(r.state.value in ('pending', 'unknown') for r in runs)\n"
        "    time.sleep(0.1)\n"
    )
    environ = user_environ(PATH=f"{shims}:{os.environ['PATH']}")
    command(sys.executable, "-c", code, *[run.run_dir for run in runs], env=environ, timeout_s=60)
    calls = log.read_text().splitlines()
    # Each new run is asked for once at first; from then on there is one question in five seconds for all.
    assert len(calls) <= len(runs) + 2, calls
    assert all(run.job_id in calls[-1] for run in runs)


def test_an_unknown_keyword_is_answered_with_the_good_ones(tmp_path):
    with pytest.raises(TypeError, match="partition=''"):
        submit("smoke", run_dir=tmp_path / "run", gpus=8)
    with pytest.raises(ConfigError, match="nosuch: no such run file"):
        submit("nosuch", run_dir=tmp_path / "run")
