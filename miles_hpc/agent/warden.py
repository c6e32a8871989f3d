"""The process that outlives the agent: starts it, kills whatever it left behind when it is gone, and starts it anew.

`python -I -S warden.py --run-id R --run-dir D --attempt N --node NODE [--die-with PID] [--stop-grace S] --
AGENT PROGRAM ARGS…`
(`--incarnation` and `--lifeline` are appended to the agent's arguments). Standard library only and few modules of it,
so that it starts in milliseconds, needs a few MB and has nothing in it that could fail.

TERM, INT and HUP stop the node in an orderly way, within the stop grace; QUIT kills everything at once.

An agent that was killed or broke is followed by a new incarnation, a limited number of times; one that left because
it was told to, or had to, is not.

Exit code: the agent's own, or 1 when agents died too often or something could not be stopped.
"""

from __future__ import annotations

import os
import sys
import time

# -S and -I leave our own package off the path. Appended, so that no module of a site directory hides a standard one.
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

from miles_hpc.agent import procfs
from miles_hpc.agent.exits import BROKEN

TYPE_CHECKING = False  # not from typing, which a warden has no other use for
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # as in procfs

STOP_GRACE = "8"
"""Default seconds between passing a TERM on to the agent and killing it: it stops its workers in that time."""
SWEEP_DEADLINE = 30.0
"""Seconds until a sweep gives up on processes that cannot be killed (they hang in the kernel)."""
PASS_INTERVAL = 0.02
RESTARTS = 3
"""Agents that may die within `RESTART_WINDOW` seconds and be followed by a new one."""
RESTART_WINDOW = 600.0

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WAITED_FOR = (signal.SIGCHLD, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, *_STOP_SIGNALS)


class Warden:
    """Supervises one agent after the other on one node of one attempt."""

    def __init__(
        self, *, run_id: str, run_dir: str, attempt: int, node: str, agent_argv: list[str], stop_grace: float
    ) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self.node = node
        self.agent_argv = agent_argv
        self.stop_grace = stop_grace
        self.mark = f"{run_id}/{attempt}/{node}/"
        self.deaths: list[float] = []
        self.stopping = False

    def run(self) -> int:
        """Keep an agent running until it leaves, and leave nothing behind. Returns the exit code."""
        code = self._run()
        # Imported at the end: while it waits, the warden is to be small.
        from miles_hpc.agent.cgroups import WorkerGroups
        from miles_hpc.agent.place import place_name

        WorkerGroups(place_name(self.run_dir, self.attempt, self.node)).close()
        return code

    def _run(self) -> int:
        procfs.become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        while True:
            code = os.waitstatus_to_exitcode(self._watch(self._start_agent()))
            died = code < 0 or code == BROKEN
            if died:
                how = f"was killed by signal {-code}" if code < 0 else "broke"
                self._say(f"the agent {how}; killing what it left")
            # Not a new agent beside an old worker that cannot be killed: it may hold GPUs and ports.
            if not self.sweep():
                return code if code > 0 else 1
            if not died or self.stopping:
                return code if code >= 0 else 1
            if not self._may_restart():
                self._say(f"{len(self.deaths)} agents died within {RESTART_WINDOW:g} s; this node gives up")
                return 1

    def _may_restart(self) -> bool:
        """Count a death of an agent."""
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < RESTART_WINDOW] + [now]
        return len(self.deaths) <= RESTARTS

    def _start_agent(self) -> int:
        incarnation = os.urandom(6).hex()
        # The agent reads EOF from the lifeline when this process is gone, however it went.
        read_end, self._lifeline = os.pipe()
        os.set_inheritable(read_end, True)
        env = dict(os.environ)
        env[procfs.MARK] = f"{self.mark}{incarnation}/agent/g0-0"
        env[procfs.RUN_DIR] = self.run_dir
        argv = [*self.agent_argv, "--incarnation", incarnation, "--lifeline", str(read_end)]
        pid = os.posix_spawnp(argv[0], argv, env, setsigmask=[], setsigdef=_WAITED_FOR)
        os.close(read_end)
        return pid

    def _watch(self, agent: int) -> int:
        """Wait for the agent's end, passing a request to stop on to it. Returns its wait status.

        One that hangs in the kernel counts as killed before it is gone: the sweep that follows names it.
        """
        kill_at = give_up_at = 0.0
        while True:
            due = kill_at or give_up_at
            left = max(0.0, due - time.monotonic()) if due else 3600.0
            info = signal.sigtimedwait(_WAITED_FOR, left)
            if info is not None and info.si_signo in _STOP_SIGNALS and not self.stopping:
                self.stopping = True
                kill_at = time.monotonic() + self.stop_grace
                # HUP: this node alone must go, its parent is gone. An agent under Slurm tells it from TERM.
                os.kill(agent, signal.SIGHUP if info.si_signo == signal.SIGHUP else signal.SIGTERM)
            elif info is not None and info.si_signo == signal.SIGQUIT:
                self.stopping = True
                os.kill(agent, signal.SIGKILL)
                kill_at, give_up_at = 0.0, time.monotonic() + SWEEP_DEADLINE
            elif info is None and kill_at:
                self._say(f"the agent did not stop within {self.stop_grace:g} s of its TERM; killing it")
                os.kill(agent, signal.SIGKILL)
                kill_at, give_up_at = 0.0, time.monotonic() + SWEEP_DEADLINE
            status = self._reap(agent)
            if status is None and give_up_at and time.monotonic() >= give_up_at:
                status = signal.SIGKILL
            if status is not None:
                os.close(self._lifeline)
                return status

    @staticmethod
    def _reap(agent: int) -> int | None:
        """Collect every ended child; the agent's wait status when it is among them."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == agent:
                found = status

    def sweep(self) -> bool:
        """Kill all descendants and all marked processes of this node and attempt. Returns whether none is left."""
        deadline = time.monotonic() + SWEEP_DEADLINE
        empty_passes = 0
        while True:
            self._reap(0)
            table = procfs.snapshot()
            left = {process.key: process for process in procfs.descendants(table, os.getpid())}
            left.update((p.key, p) for p in procfs.marked(table, self.mark, self.run_dir, skip=[os.getpid()]))
            procfs.kill_all(left.values())
            # Twice: a process that forks and exits while the table is read can be missed with its child.
            empty_passes = 0 if left else empty_passes + 1
            if empty_passes == 2:
                return True
            if time.monotonic() > deadline:
                names = ", ".join(procfs.named(process.pid for process in left.values()))
                self._say(f"still not dead {SWEEP_DEADLINE:g} s after SIGKILL: {names}")
                return False
            if left:
                signal.sigtimedwait((signal.SIGCHLD,), PASS_INTERVAL)

    def _say(self, text: str) -> None:
        print(f"warden of {self.node}: {text}", file=sys.stderr, flush=True)


def _main(argv: list[str]) -> int:
    split = argv.index("--")
    options = dict(zip(argv[:split:2], argv[1:split:2], strict=True))
    parent = int(options.get("--die-with", "0"))
    if parent:
        try:
            procfs.die_with_parent(parent, signal.SIGHUP)
        except ProcessLookupError as error:
            print(f"warden: not started: {error}", file=sys.stderr)
            return 1
    warden = Warden(
        run_id=options["--run-id"],
        run_dir=options["--run-dir"],
        attempt=int(options["--attempt"]),
        node=options["--node"],
        agent_argv=argv[split + 1 :],
        stop_grace=float(options.get("--stop-grace", STOP_GRACE)),
    )
    return warden.run()


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
