"""A control group for each worker, where the site lets us make one: who is in it, and what the kernel killed there.

Most sites do not: everything here has an answer without one. Version 2 (one tree; the memory files are there only
where the controller was handed down) and the memory tree of version 1.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

_PRESSURE = 5.0
"""Share of the last 10 s, in percent, in which something waited for memory, that counts as memory pressure."""


def own_groups() -> list[Path]:
    """This process's control groups that may hold memory accounts, version 2 first; only those that exist."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
            root = next((root for root in roots if (root / "cgroup.controllers").exists()), None)
            found.insert(0, root / path.lstrip("/") if root else Path("/nonexistent"))
        elif "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/"))
    return [path for path in found if path.is_dir()]


def oom_kills(group: Path) -> int | None:
    """How often the kernel has killed in a group for lack of memory; None where it does not say."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (group / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def own_oom_kills() -> int | None:
    """How often the kernel has killed in this process's own group; None where it does not say."""
    return next((count for group in own_groups() if (count := oom_kills(group)) is not None), None)


def machine_oom_kills() -> int | None:
    """How often the kernel of this machine has killed for lack of memory, since boot; None where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        return None
    return None


class Kills:
    """What the kernel killed for lack of memory, by one count of several workers: a kill explains one death only."""

    def __init__(self) -> None:
        self._seen = 0
        """The count at the last death that it explained."""
        self._spare = 0
        """Kills of then that have explained none."""

    def explain(self, before: int, now: int) -> Literal["no", "probable", "yes"]:
        """Whether a kill explains a death by SIGKILL, and take it. One that was there at an earlier death may have hit
        what that worker had started.

        Args:
            before: the count when the worker was started.
            now: the count after its death.
        """
        fresh = now - max(before, self._seen)
        if fresh > 0:
            self._seen, self._spare = now, self._spare + fresh - 1
            return "yes"
        if min(self._spare, now - before) <= 0:
            return "no"
        self._spare -= 1
        return "probable"


def memory_pressure() -> bool:
    """Whether processes of this machine have lately waited for memory; False where the kernel does not say."""
    try:
        line = Path("/proc/pressure/memory").read_text(encoding="ascii").splitlines()[0]
        return float(line.split("avg10=")[1].split()[0]) > _PRESSURE
    except (OSError, IndexError, ValueError):
        return False


class WorkerGroups:
    """The control groups of one agent's workers.

    Args:
        name: of the directory that holds them, unique on this machine.
        parents: where to try to make it; default: this process's own groups.
    """

    def __init__(self, name: str, parents: list[Path] | None = None) -> None:
        made = [self._made(parent, name) for parent in (own_groups() if parents is None else parents)]
        bases = [base for base in made if base is not None]
        # One with memory files where there is one: only they tell what the kernel kills.
        with_account = [base for base in bases if oom_kills(base) is not None]
        self._base: Path | None = next(iter(with_account or bases), None)
        for base in bases:
            if base != self._base:
                self.remove(base)

    @staticmethod
    def _made(parent: Path, name: str) -> Path | None:
        if not (parent / "cgroup.procs").exists():
            return None
        base = parent / name
        try:
            base.mkdir(exist_ok=True)
        except OSError:
            return None  # not ours to change: the usual case
        for group in (parent, base):
            # A group that holds processes may not hand controllers down (version 2): then there is no memory account.
            with contextlib.suppress(OSError):
                descriptor = os.open(group / "cgroup.subtree_control", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(descriptor, b"+memory")
                finally:
                    os.close(descriptor)
        return base

    @property
    def usable(self) -> bool:
        """Whether workers get a group."""
        return self._base is not None

    def make(self, worker: str) -> Path | None:
        """A fresh group, empty; None where there is none to be had."""
        if self._base is None:
            return None
        path = self._base / worker
        try:
            self.remove(path)
            path.mkdir(exist_ok=True)
        except OSError:
            return None
        return path

    @staticmethod
    def remove(group: Path) -> None:
        """Remove a group; one that still holds a process stays."""
        with contextlib.suppress(OSError):
            group.rmdir()

    def close(self) -> None:
        """Remove all groups that are empty, those of dead incarnations too."""
        if self._base is not None:
            with contextlib.suppress(OSError):
                for path in self._base.iterdir():
                    if path.is_dir():
                        self.remove(path)
            self.remove(self._base)


def members(group: Path | None) -> list[int]:
    """Pids in a group."""
    if group is None:
        return []
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []
