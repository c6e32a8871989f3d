"""What Slurm says about any number of jobs, by one question at a time for all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_hpc.launch import slurm_commands
from miles_hpc.launch.job_states import JobState, Life
from miles_hpc.launch.slurm_commands import JobRow, SlurmError

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
LONGEST_INTERVAL_S = 60.0
ACCOUNTING_BACK_OFF_S = 120.0
FORGET_S = 3600.0
"""A job that nobody has asked about for this long is not asked about any more."""


@dataclass
class _Known:
    row: JobRow | None = None
    asked: float = 0.0
    """When somebody here wanted to know, on the monotonic clock."""


class SlurmWatch:
    """Answers from a table that is at most `interval_s` old; whoever finds it older refreshes it for all.

    A job that squeue has forgotten is asked for in the accounting. Where there is none, or it fails, the accounting is
    left alone for a while. When Slurm does not answer, the interval is doubled up to a minute, and old answers stay.

    Args:
        squeue, sacct: for tests.
    """

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        *,
        squeue: Callable[[Sequence[str]], dict[str, JobRow]] = slurm_commands.squeue,
        sacct: Callable[[Sequence[str]], dict[str, JobRow]] = slurm_commands.sacct,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s, self._squeue, self._sacct, self._clock = interval_s, squeue, sacct, clock
        self._pause_s = interval_s
        self._lock = threading.Lock()
        self._jobs: dict[str, _Known] = {}
        self._next = self._accounting_next = float("-inf")

    def row(self, job_id: str) -> JobRow | None:
        """The job's newest known row; None: Slurm knows nothing of it, or has never answered."""
        with self._lock:
            now = self._clock()
            new = job_id not in self._jobs
            known = self._jobs.setdefault(job_id, _Known())
            known.asked = now
            if new or now >= self._next:
                self._refresh(now)
            return known.row

    def _refresh(self, now: float) -> None:
        self._jobs = {job_id: known for job_id, known in self._jobs.items() if now - known.asked < FORGET_S}
        # What has ended stays so; a requeued job has not ended.
        open_jobs = [
            job_id
            for job_id, known in self._jobs.items()
            if known.row is None or known.row.state.life is not Life.ENDED
        ]
        if not open_jobs:
            return
        try:
            rows = self._squeue(open_jobs)
            self._pause_s = self._interval_s
        except SlurmError as error:
            log.warning("%s; asking again in %.0f s", error, self._pause_s)
            # From its end on: a command that runs into its time limit took longer than the pause.
            self._next = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_INTERVAL_S)
            return
        self._next = now + self._pause_s
        forgotten = [job_id for job_id in open_jobs if job_id not in rows]
        rows |= self._from_accounting(forgotten, now)
        for job_id in open_jobs:
            self._jobs[job_id].row = rows.get(job_id)

    def _from_accounting(self, job_ids: Sequence[str], now: float) -> dict[str, JobRow]:
        if not job_ids or now < self._accounting_next:
            return {}
        try:
            rows = self._sacct(job_ids)
        except SlurmError as error:
            self._accounting_next = now + ACCOUNTING_BACK_OFF_S
            log.info("no accounting (%s): the run directory alone says how jobs ended", error)
            return {}
        # The accounting may call a job alive for ever that slurmctld has lost; only ends are believed.
        return {
            job_id: row if row.state.life is Life.ENDED else JobRow(job_id=job_id, state=_NOT_IN_QUEUE)
            for job_id, row in rows.items()
        }


_NOT_IN_QUEUE = JobState("UNKNOWN", Life.UNKNOWN)
_watch: SlurmWatch | None = None
_watch_lock = threading.Lock()


def shared_watch() -> SlurmWatch:
    """The one watch of this process."""
    global _watch
    with _watch_lock:
        if _watch is None:
            _watch = SlurmWatch()
        return _watch
