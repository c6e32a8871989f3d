"""Do the processes live that a worker cannot live without?

When one has died, the worker's first process may answer on for seconds. Only those count that lived when the worker
became ready, and whose own command line says that they are such: what it starts in passing, or later, ends as it likes.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Sequence

import msgspec

from miles_hpc.agent import procfs
from miles_hpc.agent.probes import Finding
from miles_hpc.wire.ids import Generation

SETTLE_S = 0.5
"""From such a death to the verdict. A worker that ends as a whole, and Slurm's signals to one process after the other,
kill these first too; then that is what happened."""
LOOK_S = 1.0
"""Between two looks at a process where the kernel (before 5.3) or the interpreter has no pidfd."""
_NAME_LIMIT = 80


class _Process(msgspec.Struct):
    generation: Generation
    pid: int
    start: int
    name: str
    """Its command line from the text on that tells that it is essential."""
    pidfd: int
    """Readable once it has ended; -1: looked at instead."""
    look_at: float
    verdict_at: float = math.inf
    how: str = ""
    signal: int | None = None


class Essentials:
    """The essential processes of a node's workers, each from the time that its worker is ready."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: dict[str, list[_Process]] = {}

    def add(self, worker: str, generation: Generation, pids: Iterable[int], texts: Sequence[str]) -> list[str]:
        """Watch those of a worker's processes whose command line holds one of `texts`. Returns what they are."""
        self.remove(worker)
        found = []
        for pid in pids if texts else ():
            process, line = procfs.read_process(pid), procfs.command_line(pid)
            text = next((text for text in texts if text in line), None)
            if process is None or text is None or line == procfs.command_line(process.ppid):
                continue  # what was forked shows its parent's command line, until it executes another program if ever
            pidfd = _pidfd_of(process)
            if pidfd is not None:
                name = line[line.index(text) :][:_NAME_LIMIT].strip()
                found.append(_Process(generation, pid, process.start, name, pidfd, self._look_after(pidfd)))
        if found:
            self._watched[worker] = found
        return [_described(process) for process in found]

    def _look_after(self, pidfd: int) -> float:
        return self._clock() + LOOK_S if pidfd < 0 else math.inf

    def remove(self, worker: str) -> None:
        """Watch a worker no more."""
        for process in self._watched.pop(worker, ()):
            _close(process)

    def filenos(self) -> list[int]:
        """Descriptors to poll for reading."""
        return [process.pidfd for process in self._all() if process.pidfd >= 0]

    def next_deadline(self) -> float:
        """When `advance` has something to do even if no descriptor is ready."""
        return min((min(process.look_at, process.verdict_at) for process in self._all()), default=math.inf)

    def advance(self, ready: set[int]) -> list[Finding]:
        """See who has ended; a finding is made once for a worker."""
        now = self._clock()
        findings = []
        for worker, processes in list(self._watched.items()):
            for process in processes:
                if process.pidfd in ready or now >= process.look_at:
                    self._look(process, now)
            first = min(processes, key=lambda one: one.verdict_at)
            if now >= first.verdict_at:
                self.remove(worker)
                text = f"its process {_described(first)}, without which it cannot go on, {first.how}"
                findings.append(Finding(worker, first.generation, "process_lost", text, first.signal))
        return findings

    def _look(self, process: _Process, now: float) -> None:
        process.look_at = self._look_after(process.pidfd)
        now_there = procfs.read_process(process.pid)
        if now_there is None or now_there.start != process.start:
            process.how, process.signal = _how(procfs.status_of_zombie(process.pid, process.start))
            process.look_at, process.verdict_at = math.inf, now + SETTLE_S
            _close(process)

    def _all(self) -> list[_Process]:
        return [process for processes in self._watched.values() for process in processes]


def _described(process: _Process) -> str:
    return f"{process.name} (pid {process.pid})"


def _how(status: int | None) -> tuple[str, int | None]:
    # None: its parent has taken the status already. 0 is also what the kernel shows to those who may not know it.
    if not status:
        return "has ended", None
    code = os.waitstatus_to_exitcode(status)
    return (f"was killed by signal {-code}", -code) if code < 0 else (f"ended with exit code {code}", None)


def _pidfd_of(process: procfs.Process) -> int | None:
    """Its pidfd; -1 where there are none; None when it has ended."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        return None if error.errno == errno.ESRCH else -1
    again = procfs.read_process(process.pid)
    if again is None or again.start != process.start:
        os.close(pidfd)
        return None
    return pidfd


def _close(process: _Process) -> None:
    if process.pidfd >= 0:
        os.close(process.pidfd)
        process.pidfd = -1
