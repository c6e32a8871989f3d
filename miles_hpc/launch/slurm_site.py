"""Slurm as the hub's site: how long the allocation lasts, which nodes are down, how the job ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_hpc.config.schema import SlurmConfig
from miles_hpc.hub.site import SiteError, SiteSeen
from miles_hpc.hub.verdict import verdict_path
from miles_hpc.launch import slurm_commands
from miles_hpc.launch.allocation import JobKey, NotInAllocation, expand_hosts
from miles_hpc.launch.job_files import job_of, requeue_path, write_exit_code, write_requeue
from miles_hpc.launch.job_states import Life
from miles_hpc.launch.slurm_commands import SlurmError
from miles_hpc.launch.step_daemon import StepDaemon

log = logging.getLogger(__name__)

_END_PATIENCE_S = 3.0
"""For what the verdict waits for: Slurm may be about to kill us."""
_GOES_ON = ("RUNNING", "RESIZING", "SIGNALING")
"""States of a job that Slurm is not ending: it may be delivering the very signal that made the run drain."""


class SlurmSite:
    """The job that this process runs in.

    Args:
        attempt: the one that this hub judges.

    Raises:
        NotInAllocation: outside of a job.
    """

    def __init__(
        self, run_dir: Path, attempt: int, config: SlurmConfig, environ: Mapping[str, str] = os.environ
    ) -> None:
        job = job_of(environ)
        if job is None:
            raise NotInAllocation("SLURM_JOB_ID is not set, but this run was started as one under Slurm")
        self._run_dir, self._attempt, self._config = run_dir, attempt, config
        self._job: JobKey = job
        self._daemon = StepDaemon()
        self._step = environ.get("SLURM_STEP_ID", "0")
        end = environ.get("SLURM_JOB_END_TIME", "")
        self._end = float(end) if end.isdigit() else None
        self._kill_wait: float | None = None
        self.hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))

    def look(self, hosts: Sequence[str]) -> SiteSeen:
        """The end of the allocation is asked for each time: it can be extended."""
        # Two questions: what one of them has found out counts, whatever becomes of the other.
        down: set[str] = set()
        try:
            down = slurm_commands.down_nodes([host.partition(".")[0] for host in hosts])
        except SlurmError as error:
            log.warning("which nodes are down is not known: %s", error)
        row = None  # the end that was known at the start still holds, or comes later
        try:
            row = slurm_commands.squeue([self._job.job_id]).get(self._job.job_id)
        except SlurmError as error:
            if self._end is None and not down:
                raise SiteError(str(error)) from error
        if row is not None and row.state.life is Life.RUNNING:
            self._end = row.end
        left = None if self._end is None else self._end - time.time()
        return SiteSeen(seconds_left=left, down_hosts=frozenset(down), kill_wait=self._read_kill_wait())

    def _read_kill_wait(self) -> float | None:
        if self._kill_wait is None:
            with contextlib.suppress(SlurmError):
                self._kill_wait = slurm_commands.seconds_of(slurm_commands.config_value("KillWait"), 30.0)
        return self._kill_wait

    def on_verdict(self) -> None:
        """Write what the batch script reads: whether to requeue, then the exit code, which says that both are there."""
        summary = _summary(self._run_dir, self._attempt)
        refusal = self._why_no_requeue(summary)
        if refusal:
            requeue_path(self._run_dir, self._job).unlink(missing_ok=True)
            log.info("job %s is not requeued: %s", self._job, refusal)
        else:
            write_requeue(self._run_dir, self._job, str(summary.get("reason", "")))
            log.info("job %s is requeued: %s", self._job, summary.get("reason", ""))
        write_exit_code(self._run_dir, self._job, int(summary.get("exit_code", 1)))

    def _why_no_requeue(self, summary: Mapping[str, Any]) -> str:
        config = self._config
        if summary.get("outcome") != "drained" or not summary.get("requeue"):
            return f"the run is {summary.get('outcome')}, and nobody asked for it"
        if not config.requeue:
            return "slurm.requeue is off"
        if self._job.restart >= config.max_requeues:
            return f"it was restarted {self._job.restart} times (slurm.max_requeues)"
        idle = idle_attempts(self._run_dir, self._attempt)
        if idle >= config.max_idle_requeues:
            return f"the last {idle} attempts have committed nothing (slurm.max_idle_requeues)"
        try:
            rows = slurm_commands.squeue([self._job.job_id], timeout_s=_END_PATIENCE_S)
        except SlurmError:
            return ""  # Slurm itself refuses it when it cannot be
        row = rows.get(self._job.job_id)
        if row is not None and row.state.name not in _GOES_ON:
            # scancel and the time limit end the job themselves; to queue it again would undo the user's cancel.
            return f"Slurm has ended it ({row.state.name})"
        return ""

    def on_leave(self, lost: Sequence[str], first_node_lost: bool) -> None:
        """End what Slurm would keep open: nobody returns srun's code when its node is gone, or a daemon on a node is.

        Otherwise the end of the last task is enough.
        """
        if not lost and not first_node_lost and not self._daemon.gone():
            return
        again = requeue_path(self._run_dir, self._job).exists()
        if first_node_lost:
            argv = ["scontrol", "requeue", self._job.job_id] if again else ["scancel", self._job.job_id]
        else:
            argv = ["scancel", f"{self._job.job_id}.{self._step}"]
        log.warning("nodes were lost (%s): %s", ", ".join(lost) or "the first", " ".join(argv))
        try:
            slurm_commands.call(argv)
        except SlurmError as error:
            log.error("the allocation may stay open: %s: run `scancel %s`", error, self._job.job_id)


def _summary(run_dir: Path, attempt: int) -> dict[str, Any]:
    try:
        found = json.loads(verdict_path(run_dir, attempt).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def idle_attempts(run_dir: Path, attempt: int) -> int:
    """How many attempts in a row, the last one being `attempt`, have not got further than the one before them.

    One without a verdict is passed over: how far it came is not known, and the next one would seem to have got there.
    """
    judged = [found for number in range(attempt, -1, -1) if (found := _summary(run_dir, number))]
    steps = [int(found.get("steps") or 0) for found in judged]
    count = 0
    for mine, before in zip(steps, [*steps[1:], 0], strict=False):
        if mine > before:
            break
        count += 1
    return count
