"""`sbatch/rollouts.sbatch` without Slurm: programs that stand where srun and miles-hpc do, and a trainer."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[3] / "sbatch" / "rollouts.sbatch"
PROGRAMS = {
    # The agents: they live until the run has been drained, or has ended by itself.
    "srun": 'until [ -e "$PLACE/over" ]; do sleep 0.05; done',
    "miles-hpc": 'echo "$@" >> "$PLACE/asked"; touch "$PLACE/over"',
    "scontrol": "exit 1",
}


def run_script(place, *trainer, **programs):
    """Returns what the script asked `miles-hpc` for."""
    (place / "bin").mkdir()
    for name, text in {**PROGRAMS, **programs}.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT), "run.toml", "--", *trainer],
        cwd=place,
        env={
            "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
            "PLACE": str(place),
            **{"SLURM_JOB_NAME": "rollouts", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"},
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (place / "asked").read_text() if (place / "asked").exists() else ""


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_its_trainer_has_left_drains(tmp_path, code):
    # The time that a run has to end by itself is over at once.
    asked = run_script(tmp_path, "sh", "-c", f"exit {code}", timeout="exit 124")
    assert asked == f"drain {tmp_path}/runs/rollouts-7 --reason the trainer ended with {code}\n"


def test_a_run_that_ends_with_its_trainer_is_left_alone(tmp_path):
    assert run_script(tmp_path, "touch", str(tmp_path / "over")) == ""
