"""The kernel's process table, read from /proc: descent, markers, and kills that cannot hit another process.

Standard library only: the warden runs this without site-packages. A pid alone names nobody for long, so everything here
speaks of a pid together with its start time.
"""

from __future__ import annotations

import os

from miles_hpc.wire import libc

TYPE_CHECKING = False  # not from typing, which a warden has no other use for
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping
else:
    # What `signal` is made of, without its enums: they would be a third of a warden's start and a fifth of its memory.
    import _signal as signal

MARK = "MILES_HPC_MARK"
"""Environment variable that marks a process as ours: `<run>/<attempt>/<node>/<incarnation>/<worker>/g<epoch>-<n>`."""
RUN_DIR = "MILES_HPC_RUN_DIR"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Process:
    """One row of the process table. `start` is in clock ticks since boot; zombies are never listed."""

    __slots__ = ("pgrp", "pid", "ppid", "session", "start")

    def __init__(self, pid: int, ppid: int, pgrp: int, session: int, start: int) -> None:
        self.pid = pid
        self.ppid = ppid
        self.pgrp = pgrp
        self.session = session
        self.start = start

    @property
    def key(self) -> tuple[int, int]:
        """(pid, start): unique until the next boot."""
        return self.pid, self.start

    def __repr__(self) -> str:
        return f"Process(pid={self.pid}, ppid={self.ppid}, pgrp={self.pgrp}, session={self.session})"


Table = dict[int, Process]


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = [os.read(fd, 65536)]
        while len(chunks[-1]) == 65536:
            chunks.append(os.read(fd, 65536))
        return b"".join(chunks)
    finally:
        os.close(fd)


def read_process(pid: int) -> Process | None:
    """The row of one process, or None when it is gone or a zombie."""
    try:
        data = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The command name stands in parentheses and may hold any byte, parentheses included.
    fields = data[data.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X", b"x"):
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def status_of_zombie(pid: int, start: int) -> int | None:
    """Wait status of a process whose parent has not taken it yet; None when it has, or lives.

    0 also where the kernel does not tell this process.
    """
    try:
        data = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    return int(fields[49]) if fields[0] == b"Z" and int(fields[19]) == start and len(fields) > 49 else None


def start_time(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot."""
    process = read_process(pid)
    return process.start if process else None


def snapshot() -> Table:
    """All living processes of this pid namespace, by pid."""
    table = {}
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        process = read_process(pid)
        if process:
            table[pid] = process
    return table


def descendants(table: Table, root: int) -> list[Process]:
    """Everything below `root`, without it. A child that was adopted by someone else is no descendant any more."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process)
    found, todo, seen = [], [root], {root}
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.pid not in seen:
                seen.add(child.pid)
                found.append(child)
                todo.append(child.pid)
    return found


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone or belongs to someone else."""
    try:
        data = _read(f"/proc/{pid}/environ")
    except OSError:
        return {}
    pairs = (item.split(b"=", 1) for item in data.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


_MARK_BYTES = MARK.encode() + b"="


def mark_of(pid: int) -> tuple[str, str]:
    """Marker and run directory in a process's environment, each "" where it has none."""
    try:
        data = _read(f"/proc/{pid}/environ")
    except OSError:
        return "", ""
    if _MARK_BYTES not in data:
        return "", ""
    mark = run_dir = b""
    for item in data.split(b"\0"):
        if item.startswith(_MARK_BYTES):
            mark = item[len(_MARK_BYTES) :]
        elif item.startswith(RUN_DIR.encode() + b"="):
            run_dir = item[len(RUN_DIR) + 1 :]
    return os.fsdecode(mark), os.fsdecode(run_dir)


def marked(table: Table, prefix: str, run_dir: str, *, skip: Iterable[int] = (), since: int = 0) -> list[Process]:
    """Processes whose marker begins with `prefix` and that belong to `run_dir`, started at `since` or later.

    Two run directories may have one name and so one run id; the directory tells them apart.
    """
    left_out = set(skip)
    found = []
    for process in table.values():
        if process.pid in left_out or process.start < since:
            continue
        mark, directory = mark_of(process.pid)
        if mark.startswith(prefix) and directory == run_dir:
            found.append(process)
    return found


def command_line(pid: int) -> str:
    """Arguments of a process joined by blanks; its name in brackets for a kernel thread; "" when it is gone."""
    try:
        data = _read(f"/proc/{pid}/cmdline")
        if not data:
            return f"[{_read(f'/proc/{pid}/comm').decode(errors='replace').strip()}]"
    except OSError:
        return ""
    return data.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def named(pids: Iterable[int]) -> list[str]:
    """Processes for people: `pid command line`, each on one line."""
    return [f"{pid} {' '.join(command_line(pid).split())[:80]}" for pid in pids]


def kill_checked(process: Process, signum: int) -> bool:
    """Signal a process, if the pid still is the one that was seen. Returns whether it was signalled."""
    now = read_process(process.pid)
    if now is None or now.start != process.start:
        return False
    try:
        os.kill(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_all(processes: Iterable[Process], signum: int = signal.SIGKILL) -> int:
    """Signal each; returns how many were still there."""
    return sum(kill_checked(process, signum) for process in processes)


def become_subreaper() -> None:
    """Adopt every orphaned descendant from now on.

    Raises:
        OSError: on a kernel without child subreapers (before 3.4).
    """
    libc.call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when the *thread* that started it ends; it survives exec.

    Raises:
        ProcessLookupError: when `parent` is gone already.
    """
    libc.call("prctl", _PR_SET_PDEATHSIG, signum, 0, 0, 0)
    # Asked after the call: a parent that died before it would never cause the signal.
    if os.getppid() != parent:
        raise ProcessLookupError(f"parent {parent} is gone, this process now belongs to {os.getppid()}")


def boot_id() -> str:
    """Changes with every boot; start times compare only within one. "" where the kernel does not say."""
    try:
        return _read("/proc/sys/kernel/random/boot_id").decode().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Names the pid namespace of this process; pids compare only within one. "" where the kernel does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - as all of /proc is read here: without paths
    except OSError:
        return ""


def worker_environ(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without what an outer process of ours left in it."""
    return {name: value for name, value in base.items() if not name.startswith("MILES_HPC_")}
