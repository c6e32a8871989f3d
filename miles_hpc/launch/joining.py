"""Places in a living run for the nodes of another job."""

from __future__ import annotations

import json
import os
from pathlib import Path

from miles_hpc.launch.allocation import Task
from miles_hpc.launch.attempts import Attempt, AttemptError, attempts_dir, read_attempts

_MOST = 10_000


def attempt_to_join(run_dir: Path) -> Attempt:
    """The newest attempt, if it lives and belongs to a job.

    Raises:
        AttemptError: when there is none to join; the text says why.
    """
    found = read_attempts(run_dir)
    if not found:
        raise AttemptError(f"{run_dir} holds no run to join: name the directory of a run that is going on")
    newest = found[-1]
    if (run_dir / "verdicts" / f"attempt-{newest.number}.json").exists():
        raise AttemptError(f"{run_dir}: attempt {newest.number} has ended: only a run that is going on can be joined")
    if not newest.nodes:
        raise AttemptError(f"{run_dir}: attempt {newest.number} runs on one machine: only a run in a job can be joined")
    return newest


def claim_place(run_dir: Path, attempt: Attempt, task: Task) -> int:
    """A node index that no node of this attempt has had: above those of its own job, each claimed once by its file.

    Raises:
        OSError: when the run directory cannot be written.
    """
    directory = attempts_dir(run_dir) / f"{attempt.number}.joined"
    directory.mkdir(exist_ok=True)
    about = json.dumps({"job": str(task.job), "step": task.step, "node": task.index, "host": task.host})
    for index in range(attempt.nodes, attempt.nodes + _MOST):
        try:
            descriptor = os.open(directory / f"{index}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "w") as file:
            file.write(about + "\n")
        return index
    raise OSError(f"{directory}: more than {_MOST} nodes have joined this attempt")
