"""The slurmstepd that started this node's task. srun waits for ever for the word of one that is gone."""

from __future__ import annotations

import os
from pathlib import Path

from miles_hpc.agent import procfs

_NAME = "slurmstepd"
_MOST_ANCESTORS = 32


class StepDaemon:
    """The nearest one above this process: a container's own processes may stand between.

    Not known in a container with a pid namespace of its own, or where /proc shows no processes of others.

    Args:
        start: the process to begin at; for tests.
    """

    def __init__(self, start: int | None = None) -> None:
        self._process: procfs.Process | None = None
        pid = os.getpid() if start is None else start
        for _ in range(_MOST_ANCESTORS):
            process = procfs.read_process(pid)
            if process is None:
                return
            if _name(pid).startswith(_NAME):
                self._process = process
                return
            pid = process.ppid

    def gone(self) -> bool:
        """Whether it certainly is."""
        known = self._process
        return known is not None and procfs.start_time(known.pid) != known.start


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
