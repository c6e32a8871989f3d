"""Every state that Slurm gives a job, and what it means for a run."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Life(enum.Enum):
    """What a job's state says about the processes of its run."""

    WAITING = "waiting"
    """Not started, or between two starts."""
    RUNNING = "running"
    """They may run, also while Slurm is ending them."""
    ENDED = "ended"
    UNKNOWN = "unknown"
    """A state that this version does not know, or no answer: never taken for an end."""


@dataclass(frozen=True)
class JobState:
    """A state as Slurm prints it, without suffixes such as ` by 1000` or `+`."""

    name: str
    life: Life

    @property
    def alive(self) -> bool:
        """Whether the job waits or runs."""
        return self.life in (Life.WAITING, Life.RUNNING)


_LIVES = {
    # The job states of `man squeue` and `man sacct`, Slurm 20.11 to 24.11.
    "BOOT_FAIL": Life.ENDED,
    "CANCELLED": Life.ENDED,
    "COMPLETED": Life.ENDED,
    "COMPLETING": Life.RUNNING,
    "CONFIGURING": Life.WAITING,
    "DEADLINE": Life.ENDED,
    "EXPEDITING": Life.WAITING,
    "FAILED": Life.ENDED,
    "LAUNCH_FAILED": Life.ENDED,
    "NODE_FAIL": Life.ENDED,
    "OUT_OF_MEMORY": Life.ENDED,
    "PENDING": Life.WAITING,
    "POWER_UP_NODE": Life.WAITING,
    "PREEMPTED": Life.ENDED,
    "RECONFIG_FAIL": Life.ENDED,
    "REQUEUED": Life.WAITING,
    "REQUEUE_FED": Life.WAITING,
    "REQUEUE_HOLD": Life.WAITING,
    "RESIZING": Life.RUNNING,
    "RESV_DEL_HOLD": Life.WAITING,
    "REVOKED": Life.ENDED,
    "RUNNING": Life.RUNNING,
    "SIGNALING": Life.RUNNING,
    "SPECIAL_EXIT": Life.WAITING,
    "STAGE_OUT": Life.RUNNING,
    "STOPPED": Life.RUNNING,
    "SUSPENDED": Life.RUNNING,
    "TIMEOUT": Life.ENDED,
    "UPDATE_DB": Life.RUNNING,
}
_SHORT = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "CF": "CONFIGURING", "CG": "COMPLETING",
    "DL": "DEADLINE", "F": "FAILED", "NF": "NODE_FAIL", "OOM": "OUT_OF_MEMORY", "PD": "PENDING", "PR": "PREEMPTED",
    "R": "RUNNING", "RD": "RESV_DEL_HOLD", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "RQ": "REQUEUED",
    "RS": "RESIZING", "RV": "REVOKED", "S": "SUSPENDED", "SE": "SPECIAL_EXIT", "SI": "SIGNALING", "SO": "STAGE_OUT",
    "ST": "STOPPED", "TO": "TIMEOUT",
}  # fmt: skip


def job_state(text: str) -> JobState:
    """The state in what Slurm prints: `RUNNING`, `CANCELLED by 1000`, `CANCELLED+`, `NF`, `NODE_FAIL,COMPLETING` …

    Of several states the one decides by which the job may still run. An unknown one is UNKNOWN and keeps its name.
    """
    words = [word.split()[0].rstrip("+*") if word.split() else "" for word in text.upper().split(",")]
    names = [_SHORT.get(word, word) for word in words if word]
    found = [JobState(name, _LIVES.get(name, Life.UNKNOWN)) for name in names]
    for life in (Life.RUNNING, Life.WAITING, Life.UNKNOWN, Life.ENDED):
        for state in found:
            if state.life is life:
                return state
    return JobState("UNKNOWN", Life.UNKNOWN)
