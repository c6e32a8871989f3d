"""Whether an attempt goes on, without its hub's word: its verdict, its process on this machine, its files, Slurm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_hpc.agent.lease import lease_path
from miles_hpc.launch.attempts import Attempt, AttemptError, gone_from_here, is_live, read_attempts
from miles_hpc.launch.job_states import Life
from miles_hpc.launch.slurm_commands import JobRow, SlurmError, squeue
from miles_hpc.postmortem.reading import read_json

FRESH_S = 5.0
"""Files that were written within this time show a living hub: it writes every second."""
SETTLE_S = 30.0
"""What the file system may take to show a verdict after Slurm has ended the job."""
LOST_AFTER_S = 300.0
"""Nobody knows anything, and no hub has written for this time: beyond a failover during a stalled file system."""
STILL_S = 2.0
"""Who does not follow a run looks twice, so long apart, at one that only its age calls dead: clocks may differ."""
SLURM_PATIENCE_S = 5.0

Slurm = Callable[[Sequence[str]], dict[str, JobRow]]


def squeue_briefly(job_ids: Sequence[str]) -> dict[str, JobRow]:
    """`squeue`, for verbs that somebody waits for. Raises SlurmError."""
    return squeue(job_ids, timeout_s=SLURM_PATIENCE_S)


@dataclass(frozen=True)
class Sign:
    """What is known of an attempt."""

    life: Life
    """WAITING: Slurm starts the run again, as another attempt. UNKNOWN: it may live; nothing tells."""
    why: str
    silent_s: float = 0.0
    """How long ago it was last heard of."""
    verdict: bool = False
    """It has ended as it should, with a verdict."""

    @property
    def over(self) -> bool:
        """Whether nothing more comes from this attempt."""
        return self.life in (Life.ENDED, Life.WAITING)

    @property
    def died(self) -> bool:
        """Whether nothing of it lives and it has left no verdict."""
        return self.life is Life.ENDED and not self.verdict

    @property
    def text(self) -> str:
        """`why`, with the age of the last sign."""
        return f"{self.why}; it was last heard of {self.silent_s:.0f} s ago"


def newest_readable(run_dir: Path) -> Attempt | None:
    """The newest attempt, where there is one that can be read."""
    try:
        found = read_attempts(run_dir)
    except (AttemptError, OSError):
        return None
    return found[-1] if found else None


def verdict_of(run_dir: Path, attempt: int) -> dict[str, Any]:
    """An attempt's verdict; empty while there is none."""
    return read_json(run_dir / "verdicts" / f"attempt-{attempt}.json")


class Watch:
    """Looks at one attempt, once or again and again. When its files move is told by this machine's clock alone; how
    old they were at first sight by the wall clocks of both, which alone end nothing.

    Args:
        slurm: asked at most every `FRESH_S`, and only about jobs whose files do not move.
        still_s: how long files must be seen not to move before their age counts as an end.
    """

    def __init__(
        self,
        run_dir: Path,
        claim: Attempt,
        *,
        slurm: Slurm = squeue_briefly,
        still_s: float = FRESH_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._claim = run_dir, claim
        self._slurm, self._still_s, self._clock, self._wall = slurm, still_s, clock, wall
        self._seen: list[tuple[int, int]] | None = None
        self._moved = 0.0
        self._still_since = 0.0
        self._row: JobRow | None = None
        self._ask_again = float("-inf")

    def heard(self) -> None:
        """Its hub has answered."""
        self._moved = self._still_since = self._clock()

    def look(self) -> Sign:
        """What is known now."""
        sign = self._with_verdict() or self._without_verdict()
        # Once more: what was seen to be gone may have written its verdict just before.
        return (self._with_verdict() or sign) if sign.over else sign

    def _with_verdict(self) -> Sign | None:
        verdict = verdict_of(self._run_dir, self._claim.number)
        return Sign(Life.ENDED, str(verdict.get("outcome", "")), verdict=True) if verdict else None

    def _without_verdict(self) -> Sign:
        claim, silent = self._claim, self._silent_s()
        if is_live(claim):
            return Sign(Life.RUNNING, f"the command that started it (pid {claim.pid}) runs", silent)
        if why := self._followed():
            return Sign(Life.ENDED, why, silent)
        if silent < FRESH_S:
            # Before its processes are asked for: they may be hidden from here.
            return Sign(Life.RUNNING, "its hub writes", silent)
        if why := gone_from_here(self._run_dir, claim):
            return Sign(Life.ENDED, why, silent)
        if claim.job_id and (sign := self._from_slurm(silent)) is not None:
            return sign
        if silent < LOST_AFTER_S or self._clock() - self._still_since < self._still_s:
            return Sign(Life.UNKNOWN, f"nothing here tells whether it lives on host {claim.host}", silent)
        return Sign(Life.ENDED, f"its hub writes no more, on host {claim.host}", silent)

    def _followed(self) -> str:
        newest = newest_readable(self._run_dir)
        return "" if newest is None or newest.number <= self._claim.number else f"attempt {newest.number} has followed"

    def _silent_s(self) -> float:
        lease = lease_path(self._run_dir, self._claim.number)
        seen = [_written(self._run_dir / "status.json"), _written(lease)]
        if self._seen is None:
            status = read_json(self._run_dir / "status.json")
            written = float(status.get("written_at", 0.0)) if status.get("attempt") == self._claim.number else 0.0
            renewed = seen[1][0] / 1e9
            self._moved = self._clock() - max(0.0, self._wall() - max(self._claim.started, written, renewed))
            self._still_since = self._clock()
        elif seen != self._seen:
            self._moved = self._still_since = self._clock()
        self._seen = seen
        return self._clock() - self._moved

    def _from_slurm(self, silent: float) -> Sign | None:
        """What the attempt's job tells; None where Slurm does not answer or does not know it."""
        if self._clock() >= self._ask_again:
            try:
                self._row = self._slurm([self._claim.job_id]).get(self._claim.job_id)
            except SlurmError:
                self._row = None
            self._ask_again = self._clock() + FRESH_S
        row = self._row
        if row is None or row.state.life is Life.UNKNOWN:
            return None
        text = f"job {row.job_id} is {row.state.name}"
        if row.state.life is Life.ENDED:
            # The verdict may be on its way through the file system.
            return Sign(Life.UNKNOWN if silent < SETTLE_S else Life.ENDED, text, silent)
        if row.state.life is Life.WAITING or row.restarts > self._claim.restart:
            return Sign(Life.WAITING, f"{text}: it was queued again", silent)
        return Sign(Life.RUNNING, text, silent)


def _written(path: Path) -> tuple[int, int]:
    """Time of the last change, in ns, and inode; zeros where there is no file."""
    try:
        # Opened, since network file systems keep what stat(2) tells by name for a minute.
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def look_once(
    claims: Sequence[tuple[Path, Attempt]],
    slurm: Slurm = squeue_briefly,
    pause: Callable[[float], None] = time.sleep,
) -> list[Sign]:
    """What is known of attempts that nobody follows; `STILL_S` are spent where only the age of files calls one dead."""
    watches = [Watch(run_dir, claim, slurm=slurm, still_s=STILL_S) for run_dir, claim in claims]
    signs = [watch.look() for watch in watches]
    old = [sign.life is Life.UNKNOWN and sign.silent_s >= LOST_AFTER_S for sign in signs]
    if any(old):
        pause(STILL_S)
    return [watch.look() if again else sign for watch, sign, again in zip(watches, signs, old, strict=True)]


def going_on(run_dirs: Sequence[Path], slurm: Slurm = squeue_briefly) -> list[tuple[Path, Sign]]:
    """Those runs whose newest attempt goes on, or may. Their hubs are not asked, Slurm once for all jobs."""
    rows: dict[str, JobRow] | None = None
    claims = {run_dir: claim for run_dir in run_dirs if (claim := newest_readable(run_dir)) is not None}

    def told(_: Sequence[str]) -> dict[str, JobRow]:
        nonlocal rows
        if rows is None:
            open_jobs = [c.job_id for d, c in claims.items() if c.job_id and not verdict_of(d, c.number)]
            try:
                rows = slurm(open_jobs)
            except SlurmError:
                rows = {}
        return rows

    looked = zip(claims, look_once(list(claims.items()), told), strict=True)
    return [(run_dir, sign) for run_dir, sign in looked if sign.life is not Life.ENDED]
