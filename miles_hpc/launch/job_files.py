"""Files in which the hub tells the batch script how this start of the job ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from miles_hpc.launch.allocation import JobKey


def exit_code_path(run_dir: Path, job: JobKey) -> Path:
    """`<run_dir>/verdicts/<job id>.<restart>.rc`."""
    return run_dir / "verdicts" / f"{job}.rc"


def requeue_path(run_dir: Path, job: JobKey) -> Path:
    """`<run_dir>/verdicts/<job id>.<restart>.requeue`."""
    return run_dir / "verdicts" / f"{job}.requeue"


def write_exit_code(run_dir: Path, job: JobKey, code: int) -> None:
    """What the batch script ends with. Raises OSError."""
    _replace(exit_code_path(run_dir, job), f"{code}\n")


def write_requeue(run_dir: Path, job: JobKey, reason: str) -> None:
    """Ask the batch script for `scontrol requeue`. Raises OSError."""
    _replace(requeue_path(run_dir, job), f"{reason}\n")


def _replace(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)


def job_of(environ: Mapping[str, str] = os.environ) -> JobKey | None:
    """The job that this process belongs to; None outside of Slurm."""
    job_id = environ.get("SLURM_JOB_ID", "")
    return JobKey(job_id=job_id, restart=int(environ.get("SLURM_RESTART_COUNT") or 0)) if job_id else None
