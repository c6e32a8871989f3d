"""A submitted run, from whatever process: where it stands, its logs, its end."""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.hub.verdict import verdict_path
from miles_hpc.launch import slurm_commands
from miles_hpc.launch.allocation import JobKey
from miles_hpc.launch.attempts import Attempt, gone_from_here, is_live, read_attempts
from miles_hpc.launch.job_files import exit_code_path, requeue_path
from miles_hpc.launch.job_states import Life
from miles_hpc.launch.slurm_commands import JobRow, SlurmError
from miles_hpc.launch.submission import Submitted, job_file
from miles_hpc.launch.watch import SlurmWatch, shared_watch

FRESH_S = 15.0
"""A status.json that was written within this time shows a living hub."""
WRITES_S = 5.0
"""Likewise where no process of the run is seen on its machine: they may be hidden. A hub writes every second."""
SETTLE_S = 30.0
"""What the file system may take to show a verdict after Slurm has ended the job."""
LOST_AFTER_S = 300.0
"""Slurm knows nothing, and no hub writes: after this time the run is lost."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class State(enum.Enum):
    """Where a run stands. The last five are for good, unless the run is resumed."""

    UNKNOWN = "unknown"
    PENDING = "pending"
    """The job waits in the queue, for its first or next start."""
    STARTING = "starting"
    """The job runs; not all cells have been ready yet."""
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    DRAINED = "drained"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Neither Slurm nor any file knows how it ended."""

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self in _TERMINAL


_TERMINAL = {State.FINISHED, State.FAILED, State.DRAINED, State.CANCELLED, State.LOST}


@dataclass(frozen=True)
class Standing:
    """A state, and why."""

    state: State
    reason: str = ""


class RunTimeout(TimeoutError):
    """The run did not get there in time; the text says where it stands."""


class Run:
    """A run by its directory. Cheap to make, also in a notebook, and by another process than the one that submitted.

    Args:
        run_dir: as `submit` has returned or shown it.

    Raises:
        FileNotFoundError: when the directory holds neither a submission nor an attempt.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        watch: SlurmWatch | None = None,
        lost_after_s: float = LOST_AFTER_S,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir = Path(run_dir).expanduser().absolute()
        self._watch, self._clock = watch, clock
        self._lost_after_s, self._settle_s = lost_after_s, settle_s
        self._silent_since: float | None = None
        self._ended_since: float | None = None
        self._status_seen: tuple[Any, float] | None = None
        """What says when status.json was written, and when that was seen, on our clock."""
        if not job_file(self.run_dir).is_file() and not (self.run_dir / "attempts").is_dir():
            raise FileNotFoundError(
                f"{self.run_dir} holds no submitted run: give the directory that `submit` has shown"
            )

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}, job {self.job_id or 'none'}, {self.state.value})"

    # ------------------------------------------------------------------------------------------ identity
    @property
    def job_id(self) -> str:
        """Of the newest submission or attempt; empty for a run that never was a job."""
        submitted = _read(job_file(self.run_dir), Submitted)
        newest = self._newest()
        if submitted is not None and (newest is None or submitted.submitted > newest.started):
            return submitted.job_id
        return newest.job_id if newest is not None else ""

    @property
    def attempt(self) -> int | None:
        """The newest attempt's number; None before the first start."""
        newest = self._newest()
        return None if newest is None else newest.number

    def _newest(self) -> Attempt | None:
        found = read_attempts(self.run_dir)
        return found[-1] if found else None

    # --------------------------------------------------------------------------------------------- state
    @property
    def state(self) -> State:
        """Where the run stands now."""
        return self.standing().state

    def standing(self) -> Standing:
        """State and reason, from the newest attempt's verdict, then its hub's status, then squeue, then sacct."""
        newest, job_id = self._newest(), self.job_id
        waiting = newest is None or newest.job_id != job_id
        verdict = None if newest is None or waiting else self._verdict(newest.number)
        gone = ""
        if newest is not None and not waiting and verdict is None:
            gone = gone_from_here(self.run_dir, newest)
            # Once more: what was seen to be gone may have written it just before.
            verdict = self._verdict(newest.number) if gone else None
        if newest is not None and verdict is not None and not self._goes_on(newest, verdict):
            return Standing(State(verdict["outcome"]), str(verdict.get("reason", "")))
        fresh_s = WRITES_S if gone else FRESH_S
        if newest is not None and not waiting and verdict is None and self._hub_lives(newest, fresh_s):
            self._silent_since = self._ended_since = None
            return Standing(self._started(newest), f"attempt {newest.number}, job {job_id}")
        if gone and verdict is None:
            return Standing(State.LOST, f"{gone}, without a verdict: see {self.run_dir}/logs/latest")
        return self._from_slurm(job_id, newest, verdict)

    def _goes_on(self, attempt: Attempt, verdict: dict[str, Any]) -> bool:
        """A drained attempt whose job is, or is about to be, asked to be queued again, and which Slurm calls alive."""
        if not verdict.get("requeue") or not attempt.job_id:
            return False
        key = JobKey(job_id=attempt.job_id, restart=attempt.restart)
        # Both files come after the verdict; the exit code is the last.
        if exit_code_path(self.run_dir, key).exists() and not requeue_path(self.run_dir, key).exists():
            return False
        row = self._row(attempt.job_id)
        return row is not None and row.state.life is not Life.ENDED

    def _started(self, attempt: Attempt) -> State:
        """Of an attempt that goes on: whether all its cells have been ready, as its hub wrote last."""
        found = self.status()
        ready = found.get("attempt") == attempt.number and (found.get("seconds") or {}).get("ready") is not None
        return State.RUNNING if ready else State.STARTING

    def _from_slurm(self, job_id: str, newest: Attempt | None, verdict: dict[str, Any] | None) -> Standing:
        if not job_id:
            alive = newest is not None and is_live(newest)
            return Standing(State.RUNNING, "") if alive else self._silent("nothing here tells whether it lives")
        row = self._row(job_id)
        if row is None or row.state.life is Life.UNKNOWN:
            return self._silent(f"Slurm does not know job {job_id}")
        self._silent_since = None
        if row.state.life is Life.WAITING:
            self._ended_since = None
            return Standing(State.PENDING, row.reason or row.state.name)
        if row.state.life is Life.RUNNING:
            self._ended_since = None
            state = State.STARTING if verdict is None else State.PENDING
            if newest is not None and verdict is None and (newest.job_id, newest.restart) == (job_id, row.restarts):
                # A hub that does not write, or whose clock is another one: what it wrote last of this start holds.
                state = self._started(newest)
            return Standing(state, f"job {job_id} is {row.state.name}")
        return self._ended(row, job_id)

    def _ended(self, row: JobRow, job_id: str) -> Standing:
        """Slurm has ended the job, and there is no verdict: wait for the file system, then believe Slurm."""
        now = self._clock()
        self._ended_since = self._ended_since if self._ended_since is not None else now
        text = f"job {job_id} is {row.state.name} and has left no verdict"
        if row.state.name == "CANCELLED":
            return Standing(State.CANCELLED, text)
        if now - self._ended_since < self._settle_s and self._newest() is not None:
            return Standing(State.UNKNOWN, text)
        return Standing(State.FAILED, f"{text}: see {self.output_path() or self.run_dir}")

    def _silent(self, text: str) -> Standing:
        now = self._clock()
        self._silent_since = self._silent_since if self._silent_since is not None else now
        waited = now - self._silent_since
        if waited < self._lost_after_s:
            return Standing(State.UNKNOWN, text)
        return Standing(
            State.LOST, f"{text}, and no hub has written for {waited:.0f} s: see {self.run_dir}/logs/latest"
        )

    def _row(self, job_id: str) -> JobRow | None:
        watch = self._watch or shared_watch()
        return watch.row(job_id)

    def _verdict(self, attempt: int) -> dict[str, Any] | None:
        return _read_json(verdict_path(self.run_dir, attempt)) or None

    def _hub_lives(self, attempt: Attempt, fresh_s: float) -> bool:
        """Whether status.json is written again and again. The hub's clock is compared with ours only at first sight:
        the two may differ by more than what tells a living hub from a dead one."""
        found = self.status()
        if found.get("attempt") != attempt.number:
            return False
        now, written = self._clock(), found.get("written_at", 0.0)
        if self._status_seen is None:
            self._status_seen = written, now - max(0.0, time.time() - float(written))
        elif self._status_seen[0] != written:
            self._status_seen = written, now
        return now - self._status_seen[1] < fresh_s

    # ------------------------------------------------------------------------------------------- reading
    def status(self) -> dict[str, Any]:
        """What the hub wrote last: nodes, cells, step; empty before its first word."""
        return _read_json(self.run_dir / "status.json")

    def summary(self) -> dict[str, Any]:
        """summary.json: final only if no newer attempt exists; empty while there is none."""
        return _read_json(self.run_dir / "summary.json")

    def output_path(self) -> Path | None:
        """What the batch script has written, if it was started by `submit`."""
        path = self.run_dir / "slurm" / f"{self.job_id}_0_log.out"
        return path if self.job_id and path.is_file() else None

    def logs(self, worker: str = "", lines: int = 50) -> str:
        """The end of a log: of the newest start of a worker, cell or pool; without a name, of the batch script."""
        if worker:
            found = sorted((self.run_dir / "logs" / "latest").glob(f"*/{worker}*.log"), key=lambda p: p.stat().st_mtime)
            path = found[-1] if found else None
        else:
            path = self.output_path()
        if path is None:
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    # ------------------------------------------------------------------------------------------- waiting
    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until all cells serve.

        Raises:
            RuntimeError: when the run ends before that; the text says why.
            RunTimeout: after `timeout_s`.
        """
        standing = self._wait(lambda found: found.state is State.RUNNING or found.state.terminal, timeout_s)
        if standing.state.terminal and standing.state is not State.FINISHED:
            raise RuntimeError(f"{self.run_dir}: {standing.state.value} before it was ready: {standing.reason}")

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end, over all requeues. Returns the summary; `outcome` and `reason` are always in it.

        Raises:
            RunTimeout: after `timeout_s`.
        """
        standing = self._wait(lambda found: found.state.terminal, timeout_s)
        verdict = self._verdict(self.attempt) if self.attempt is not None else None
        return {**(verdict or {}), "outcome": standing.state.value, "reason": standing.reason}

    def _wait(self, done: Callable[[Standing], bool], timeout_s: float | None) -> Standing:
        deadline = None if timeout_s is None else self._clock() + timeout_s
        pause, never = _FIRST_PAUSE_S, threading.Event()
        while True:
            found = self.standing()
            if done(found):
                return found
            left = float("inf") if deadline is None else deadline - self._clock()
            if left <= 0:
                raise RunTimeout(f"{self.run_dir}: {found.state.value} after {timeout_s:g} s: {found.reason}")
            never.wait(min(pause, left))
            pause = min(pause * 1.3, _LONGEST_PAUSE_S)

    # ------------------------------------------------------------------------------------------ steering
    def drain(self, reason: str = "", *, requeue: bool = False) -> None:
        """Ask the run to commit and stop; returns when it was asked.

        Raises:
            RuntimeError: when neither its hub nor Slurm can be reached.
        """
        if self._ask_hub(lambda hub: hub.drain(reason or "asked for by a user", requeue=requeue)):
            return
        # Many sites have no route from login to compute nodes; Slurm has one. Its signal means drain and requeue.
        self._signal(["--signal=USR2"], "drain")

    def cancel(self, reason: str = "") -> None:
        """End the run, or take it out of the queue; returns when it was asked. Raises RuntimeError as `drain`."""
        if not self._ask_hub(lambda hub: hub.cancel(reason or "cancelled by a user")):
            self._signal([], "cancel")

    def _ask_hub(self, question: Callable[[Any], None]) -> bool:
        from miles_hpc.wire.operator import OperatorClient
        from miles_hpc.wire.sockets import HubError

        newest = self._newest()
        if newest is None or self._verdict(newest.number) is not None:
            return False
        try:
            with OperatorClient(self.run_dir, newest.number, timeout_s=3.0) as hub:
                question(hub)
        except HubError:
            return False
        return True

    def _signal(self, options: list[str], verb: str) -> None:
        job_id = self.job_id
        if not job_id:
            raise RuntimeError(f"{self.run_dir}: nobody to {verb}: it has no job, and its hub does not answer")
        try:
            slurm_commands.call(["scancel", *options, job_id])
        except SlurmError as error:
            raise RuntimeError(
                f"{self.run_dir}: its hub does not answer, and Slurm refused to {verb}: {error}"
            ) from error


def _read(path: Path, kind: type[Submitted]) -> Submitted | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
