"""Worker processes: how one is started, and when one is *stopped*.

Stopped means that nothing is left: no process of the worker's group or session, no descendant of it wherever it was
adopted, no process with its marker or in its control group, and its ports free. The agent is a child subreaper, so
every process that a worker ever started stays below the agent as long as it lives.

Nothing here blocks: the agent calls `reap` on SIGCHLD and `advance` when `next_deadline` has come.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from miles_hpc.agent import procfs
from miles_hpc.agent.cgroups import members
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.program import STOP_SIGNAL

# The words of `WorkerExited.cause`, to which mypy holds them: the hub is started before the messages are imported.
Cause = Literal[
    "exited",
    "stopped",
    "probe_failed",
    "start_deadline",
    "spawn_failed",
    "stopped_by_slurm",
    "port_taken",
    "process_lost",
]

OBSERVE_INTERVAL = 2.0
"""Seconds between two looks at what the workers have started: whoever was seen once is known for good."""
FIRST_CHECK, LONGEST_CHECK = 0.01, 0.2
"""Seconds between two checks of a worker that is being stopped."""
ORPHAN_GRACE = 1.0
"""Seconds that the rest of a worker keeps after TERM once its first process has ended."""
OVERDUE_EVERY = 10.0
"""Seconds after SIGKILL, and between two mentions, of a worker that does not die (it hangs in the kernel)."""
HOPELESS_AFTER = 30.0
"""Seconds after SIGKILL until an agent that leaves waits no longer: its warden looks for as long once more."""
PORT_PATIENCE = 2.0
"""Seconds to wait for the ports of a worker that has no process left."""
OWN_STOP_SIGNAL = signal.SIGHUP
"""Stops our own programs. Nobody else sends it, while Slurm sends SIGTERM to every process of a step."""
SHIM = str(Path(__file__).with_name("spawn_shim.py"))
# Slurm signals every process of a step: USR1/USR2 would kill a third-party program before any drain, TERM one of ours.
# SIG_IGN survives exec.
_SLURM_SIGNALS: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGUSR2)
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""What the shim's interpreter itself ignores; a program expects the defaults."""
_CATCHABLE = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class SpawnError(Exception):
    """The operating system did not give a process; the text says why."""


class Exit(msgspec.Struct):
    """How a worker ended."""

    name: str
    generation: Generation
    pid: int
    exit_code: int | None
    signal: int | None
    killed_by_us: bool
    cause: Cause
    text: str
    leftovers: int
    """Processes that its first process left behind and that were killed."""


class Worker(msgspec.Struct):
    """One started worker. `name` is its worker id; the hub's own process is called `hub`."""

    name: str
    generation: Generation
    mark: str
    pid: int
    start: int
    stop_grace: float
    ports_free: Callable[[], str]
    stop_signal: signal.Signals
    group: Path | None = None
    """Its control group, where there is one."""
    known: dict[int, int] = msgspec.field(default_factory=dict)
    """pid -> start time of every living process that was seen to belong to it."""
    status: int | None = None
    """Wait status of its first process."""
    just_ended: bool = False
    """Its first process has ended since the last look."""
    cause: Cause = "exited"
    text: str = ""
    stopping: bool = False
    kill_at: float = 0.0
    killed_since: float = math.inf
    """When SIGKILL was first sent to what was left of it."""
    killed: bool = False
    leftovers: set[tuple[int, int]] = msgspec.field(default_factory=set)
    empty_passes: int = 0
    empty_since: float = 0.0
    pause: float = FIRST_CHECK
    check_at: float = 0.0
    overdue_at: float = 0.0


class Supervisor:
    """All worker processes of one agent. For the main thread only: PDEATHSIG belongs to the thread that spawns.

    Args:
        mark_prefix: `<run>/<attempt>/<node>/<incarnation>/`.
        run_dir: what `MILES_HPC_RUN_DIR` says in the environment of every worker.
        clock: monotonic seconds.
    """

    def __init__(self, mark_prefix: str, run_dir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.mark_prefix = mark_prefix
        self.run_dir = run_dir
        self.workers: dict[str, Worker] = {}
        self._clock = clock
        self._observe_at = clock()
        self._pid = os.getpid()
        self._unowned: set[tuple[int, int]] = set()
        """Descendants that belong to no worker, as of the last look."""
        self._table: procfs.Table = {}
        """All processes of the machine, as of the last look."""

    def spawn(
        self,
        name: str,
        generation: Generation,
        argv: list[str],
        env: Mapping[str, str],
        log: int,
        *,
        stop_grace: float = 5.0,
        ports_free: Callable[[], str] = str,
        group: Path | None = None,
    ) -> Worker:
        """Start a program in a session of its own.

        Args:
            log: descriptor that its output goes to; stays the caller's.
            ports_free: says "" when all ports of the worker are free, otherwise which one is not.
            group: control group that the program is put into.

        Raises:
            SpawnError: when no process could be made; `argv[0]` that cannot be executed ends the worker with code 127.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers are started by the main thread only: PDEATHSIG fires when its thread ends")
        if name in self.workers:
            raise SpawnError(f"{name} of generation {self.workers[name].generation} is not stopped yet")
        mark = f"{self.mark_prefix}{name}/g{generation}"
        full_env = {**env, procfs.MARK: mark, procfs.RUN_DIR: self.run_dir, "SPT_NOENV": "1"}
        stop_signal = signal.SIGTERM
        ignored = _SLURM_SIGNALS
        if is_own_program(argv):
            stop_signal, ignored = OWN_STOP_SIGNAL, (*_SLURM_SIGNALS, signal.SIGTERM, signal.SIGINT)
            full_env[STOP_SIGNAL] = stop_signal.name
        command = [sys.executable, "-I", "-S", SHIM, str(self._pid), str(int(signal.SIGKILL))]
        command += ["" if group is None else str(group), _numbers(_PYTHON_IGNORES), _numbers(ignored), *argv]
        try:
            pid = os.posix_spawn(
                sys.executable,
                command,
                full_env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsigmask=[],
                setsigdef=_CATCHABLE,
            )
        except (OSError, ValueError) as error:
            raise SpawnError(f"cannot start {argv[0]!r}: {error}") from error
        # None only if it is dead already; then nothing can be confused with it, since it is not reaped yet.
        start = procfs.start_time(pid) or 0
        worker = Worker(
            name, generation, mark, pid, start, stop_grace, ports_free, stop_signal, group, known={pid: start}
        )
        self.workers[name] = worker
        return worker

    def stop(self, name: str, cause: Cause = "stopped", text: str = "", *, grace: float | None = None) -> None:
        """Begin to stop a worker: its stop signal to its group now, KILL to all of it after `grace` (default: its own).

        With a grace of 0 there is only KILL, so that it cannot do anything more. A later call can only shorten the
        grace; the first cause stands.
        """
        worker = self.workers[name]
        now = self._clock()
        kill_at = now + (worker.stop_grace if grace is None else grace)
        if worker.stopping:
            worker.kill_at = min(worker.kill_at, kill_at)
        else:
            self._begin(worker, kill_at, now)
            if worker.status is None:
                worker.cause, worker.text = cause, text
                if kill_at > now:
                    # Its first process is not reaped, so the number of its group cannot belong to anyone else.
                    _signal_group(worker.pid, worker.stop_signal)
        worker.check_at = now

    def _begin(self, worker: Worker, kill_at: float, now: float) -> None:
        self.observe()
        worker.stopping = True
        worker.kill_at = kill_at
        worker.check_at = now

    def reap(self) -> list[Exit]:
        """Collect ended children, adopted ones too; a worker whose first process ended begins to stop.

        Returns the ends that nobody had asked for; what those workers left behind is not known yet.
        """
        ended: list[Exit] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for worker in self.workers.values():
                if worker.pid == pid and worker.status is None:
                    now = self._clock()
                    worker.status, worker.just_ended = status, True
                    if not worker.stopping:
                        worker.stopping, worker.kill_at = True, now  # what it left behind is killed at once
                        ended.append(self.exit_of(worker))
                    worker.kill_at = min(worker.kill_at, now + ORPHAN_GRACE)
                    worker.check_at = now

    def _adopt_orphans(self, table: procfs.Table, unowned: set[tuple[int, int]]) -> dict[str, list[procfs.Process]]:
        """What nobody owned before and hangs below this agent right after a worker's end was started by that worker.

        Only for a process without session, marker and history does this decide: born since the last look.
        """
        ended = [worker for worker in self.workers.values() if worker.just_ended]
        for worker in ended:
            worker.just_ended = False
        born = [table[pid] for pid, _ in unowned - self._unowned]
        return {worker.name: [process for process in born if process.ppid == self._pid] for worker in ended[:1]}

    def observe(self) -> dict[str, list[procfs.Process]]:
        """Look at all descendants and remember whose they are. Returns the living processes of each worker."""
        table = procfs.snapshot()
        mine: dict[str, list[procfs.Process]] = {name: [] for name in self.workers}
        owner_of: dict[int, str] = {}
        unowned = set()
        in_group = {pid: name for name, worker in self.workers.items() for pid in members(worker.group)}
        below = procfs.descendants(table, self._pid)  # parents before children
        adopted = in_group.keys() - {process.pid for process in below}
        for process in [*below, *(table[pid] for pid in adopted if pid in table)]:
            owner = in_group.get(process.pid) or self._owner(process, owner_of)
            if owner is not None:
                owner_of[process.pid] = owner
                mine[owner].append(process)
            else:
                unowned.add(process.key)
        for name, orphans in self._adopt_orphans(table, unowned).items():
            mine[name] += orphans
            unowned -= {process.key for process in orphans}
        self._unowned, self._table = unowned, table
        for name, worker in self.workers.items():
            worker.known = {process.pid: process.start for process in mine[name]}
        self._observe_at = self._clock() + OBSERVE_INTERVAL
        return mine

    def _owner(self, process: procfs.Process, owner_of: Mapping[int, str]) -> str | None:
        for name, worker in self.workers.items():
            if worker.known.get(process.pid) == process.start:
                return name
        if process.ppid in owner_of:
            return owner_of[process.ppid]
        for name, worker in self.workers.items():
            if worker.pid in (process.session, process.pgrp) and process.start >= worker.start:
                return name
        mark, _ = procfs.mark_of(process.pid)
        return next((name for name, worker in self.workers.items() if worker.mark == mark), None)

    def pids(self, name: str) -> list[int]:
        """The living processes of a worker."""
        return [process.pid for process in self.observe()[name]]

    def next_deadline(self) -> float:
        """When `advance` has something to do, on this supervisor's clock."""
        checks = [worker.check_at for worker in self.workers.values() if worker.stopping]
        return min([self._observe_at, *checks])

    def advance(self) -> list[Exit]:
        """Move every worker that is being stopped one step on; returns those of which nothing is left."""
        now = self._clock()
        due = [worker for worker in self.workers.values() if worker.stopping and worker.check_at <= now]
        if not due:
            if now >= self._observe_at and self.workers:
                self.observe()
            elif now >= self._observe_at:
                self._observe_at = now + OBSERVE_INTERVAL
            return []
        mine = self.observe()
        exits = []
        for worker in due:
            if self._is_gone(worker, mine[worker.name], now):
                exits.append(self.exit_of(worker))
                del self.workers[worker.name]
            else:
                worker.check_at = now + worker.pause
                worker.pause = min(worker.pause * 1.5, LONGEST_CHECK)
        return exits

    def _is_gone(self, worker: Worker, living: list[procfs.Process], now: float) -> bool:
        if not living and worker.status is not None:
            # A marker also finds what no line of descent leads to.
            living = procfs.marked(self._table, worker.mark, self.run_dir, since=worker.start)
        if living or worker.status is None:
            worker.empty_passes = 0
            if now >= worker.kill_at:
                worker.killed = worker.killed or worker.status is None
                worker.killed_since = min(worker.killed_since, now)
                worker.leftovers.update(process.key for process in living if process.pid != worker.pid)
                procfs.kill_all(living)
                worker.pause = FIRST_CHECK
            return False
        # Twice: a process that forks and exits while the table is read can be missed with its child.
        worker.empty_passes += 1
        if worker.empty_passes == 1:
            worker.empty_since = now
            worker.pause = FIRST_CHECK
            return False
        busy = worker.ports_free()
        if busy and now - worker.empty_since < PORT_PATIENCE:
            return False
        if busy:
            worker.text = f"{worker.text}; {busy}".lstrip("; ")
        return True

    @staticmethod
    def exit_of(worker: Worker) -> Exit:
        """How it ended, or ends: with neither code nor signal while its first process is left."""
        code = None if worker.status is None else os.waitstatus_to_exitcode(worker.status)
        return Exit(
            name=worker.name,
            generation=worker.generation,
            pid=worker.pid,
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            killed_by_us=worker.killed,
            cause=worker.cause,
            text=worker.text,
            leftovers=len(worker.leftovers),
        )

    def overdue(self) -> list[Worker]:
        """Workers that should have been gone long ago; each is named once every `OVERDUE_EVERY`."""
        now = self._clock()
        found = []
        for worker in self.workers.values():
            if worker.stopping and now > max(worker.kill_at, worker.overdue_at) + OVERDUE_EVERY:
                worker.overdue_at = now
                found.append(worker)
        return found

    def only_hopeless(self) -> bool:
        """Whether no worker is left but such that nothing can end (they hang in the kernel). True without any."""
        long_ago = self._clock() - HOPELESS_AFTER
        return all(worker.killed_since < long_ago and not worker.empty_passes for worker in self.workers.values())

    def strays(self) -> list[procfs.Process]:
        """Descendants that belong to no worker: orphans of a worker that is gone and had wiped their environment."""
        table = procfs.snapshot()
        mine = {process.pid for processes in self.observe().values() for process in processes}
        return [process for process in procfs.descendants(table, self._pid) if process.pid not in mine]


def _numbers(signals: Iterable[signal.Signals]) -> str:
    return ",".join(str(int(each)) for each in signals)


def is_own_program(argv: Sequence[str]) -> bool:
    """Whether a command line starts a program of this package."""
    return any(flag == "-m" and module.startswith("miles_hpc.") for flag, module in itertools.pairwise(argv))


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        # The shim has not made its session yet: then the process is alone.
        try:
            os.kill(group, signum)
        except ProcessLookupError:
            return
    except PermissionError:
        return
