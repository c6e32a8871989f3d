"""Which run is meant, and whom to ask about it: its hub, or what it left in its directory."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from miles_hpc.agent.procfs import boot_id
from miles_hpc.cli.exits import one_line
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import Attempt, AttemptError, is_live, read_attempts, registered_runs
from miles_hpc.postmortem.reading import read_json

if TYPE_CHECKING:
    from miles_hpc.wire.operator import OperatorClient

T = TypeVar("T")

HUB_PATIENCE_S = 3.0
_FRESH_S = 15.0
"""A status.json that was written within this time speaks for a run on another host."""


def find_run(name: str) -> Path:
    """The directory of a run, by directory, by id, or the only one that is running.

    Raises:
        ConfigError: when there is no such run, or the name says too little.
    """
    if name:
        path = Path(name).expanduser()
        if (path / "attempts").is_dir():
            return path.absolute()
        for entry in registered_runs():
            if entry.run_id == name:
                return Path(entry.run_dir)
        known = [entry.run_id for entry in registered_runs()[:5]]
        hint = f"known runs are {', '.join(known)}" if known else "no run is known on this account"
        raise ConfigError(f"{name}: no run directory and no run of that id; {hint}")
    living = [entry for entry in registered_runs() if _lives(Path(entry.run_dir))]
    if len(living) == 1:
        return Path(living[0].run_dir)
    if not living:
        raise ConfigError("no run is going on here: name a run directory or id")
    names = ", ".join(entry.run_id for entry in living)
    raise ConfigError(f"{len(living)} runs are going on ({one_line(names)}): name one of them")


def is_run(name: str) -> bool:
    """Whether a word names a run."""
    try:
        return bool(name) and bool(find_run(name))
    except ConfigError:
        return False


def _lives(run_dir: Path) -> bool:
    """Whether a run seems to go on, without asking anybody: here by its process, elsewhere by its fresh status."""
    try:
        attempts = read_attempts(run_dir)
    except (AttemptError, OSError):
        return False
    if not attempts or ended(run_dir, attempts[-1].number):
        return False
    if is_live(attempts[-1]):
        return True
    written = read_json(run_dir / "status.json")
    fresh = time.time() - float(written.get("written_at", 0.0)) < _FRESH_S
    return fresh and written.get("attempt") == attempts[-1].number and not _is_here(attempts[-1])


def _is_here(attempt: Attempt) -> bool:
    """Whether an attempt was claimed on this machine, since it was started: only then its process can be asked for."""
    return attempt.host == socket.gethostname() and attempt.boot in ("", boot_id())


def newest_attempt(run_dir: Path) -> int:
    """The newest attempt's number.

    Raises:
        ConfigError: when nothing was ever started there.
        AttemptError: when a claim does not parse.
    """
    attempts = read_attempts(run_dir)
    if not attempts:
        raise ConfigError(f"{run_dir}: nothing was ever started here")
    return attempts[-1].number


def ended(run_dir: Path, attempt: int) -> bool:
    """Whether an attempt has its verdict."""
    return (run_dir / "verdicts" / f"attempt-{attempt}.json").exists()


def ask(run_dir: Path, question: Callable[[OperatorClient], T], timeout_s: float = HUB_PATIENCE_S) -> T:
    """Ask the hub of the newest attempt; one that cannot run any more is not waited for.

    Raises:
        HubError: when it cannot be reached, or refuses; the text says why.
        ConfigError, AttemptError: as `newest_attempt`.
    """
    from miles_hpc.wire.operator import OperatorClient
    from miles_hpc.wire.sockets import HubUnreachable

    number = newest_attempt(run_dir)
    if ended(run_dir, number):
        raise HubUnreachable(f"attempt {number} has ended")
    claim = read_attempts(run_dir)[-1]
    if not claim.job_id and _is_here(claim) and not is_live(claim):
        raise HubUnreachable(f"attempt {number} is gone with the command that started it (pid {claim.pid})")
    with OperatorClient(run_dir, number, timeout_s=timeout_s) as hub:
        return question(hub)


def read_status(run_dir: Path) -> tuple[dict[str, Any] | None, str]:
    """What the hub says; what it wrote last where it does not answer; None where it wrote nothing.

    Returns:
        The status, with `source` and `age_s` (how old it is), and why the hub was not asked ("" when it was).

    Raises:
        ConfigError, AttemptError: as `newest_attempt`.
    """
    from miles_hpc.wire.sockets import HubError

    try:
        reply: dict[str, Any] = msgspec.to_builtins(ask(run_dir, lambda hub: hub.status()))
        return {"epoch": 0, "summary": {}, "outcome": "", **reply, "source": "hub"}, ""
    except HubError as error:
        why = str(error)
    written = read_json(run_dir / "status.json")
    if not written:
        return None, why
    age = max(0.0, time.time() - written.get("written_at", time.time()))
    return {**written, "age_s": round(age, 3), "source": "status.json"}, why


def note_fallback(why: str, path: Path) -> None:
    """Say on stderr that a file is shown instead of the hub's answer, and how old it is."""
    try:
        age = f"{max(0.0, time.time() - path.stat().st_mtime):.1f} s old"
    except OSError:
        age = "which is not there"
    print(f"miles-hpc: note: the hub was not reached: {one_line(why)}; shown is {path}, {age}", file=sys.stderr)
