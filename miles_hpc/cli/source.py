"""Which run is meant, and whom to ask about it: its hub, or what it left in its directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from miles_hpc.cli.exits import FAILED, FINISHED, one_line
from miles_hpc.cli.signs import Sign, going_on, look_once, verdict_of
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import Attempt, gone_from_here, read_attempts, registered_runs
from miles_hpc.launch.job_states import Life
from miles_hpc.postmortem.reading import read_json

if TYPE_CHECKING:
    from miles_hpc.wire.operator import OperatorClient

T = TypeVar("T")

HUB_PATIENCE_S = 3.0


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
    runs = registered_runs()
    names = {Path(entry.run_dir): entry.run_id for entry in runs}
    living = going_on(list(names))
    if len(living) == 1:
        return living[0][0]
    if not living:
        hint = f" (the newest was {one_line(runs[0].run_id)})" if runs else ""
        raise ConfigError(f"no run is going on here{hint}: name a run directory or id")
    ages = {run_dir: f" silent for {sign.silent_s:.0f} s" for run_dir, sign in living if sign.life is Life.UNKNOWN}
    listed = ", ".join(names[run_dir] + ages.get(run_dir, "") for run_dir, _ in living)
    raise ConfigError(f"{len(living)} runs are going on ({one_line(listed)}): name one of them")


def is_run(name: str) -> bool:
    """Whether a word names a run."""
    try:
        return bool(name) and bool(find_run(name))
    except ConfigError:
        return False


def newest_claim(run_dir: Path) -> Attempt:
    """The newest attempt.

    Raises:
        ConfigError: when nothing was ever started there.
        AttemptError: when a claim does not parse.
    """
    attempts = read_attempts(run_dir)
    if not attempts:
        raise ConfigError(f"{run_dir}: nothing was ever started here")
    return attempts[-1]


def ask(
    run_dir: Path,
    question: Callable[[OperatorClient], T],
    timeout_s: float = HUB_PATIENCE_S,
    claim: Attempt | None = None,
) -> T:
    """Ask the hub of an attempt, by default the newest; one that cannot run any more is not waited for.

    Raises:
        HubError: when it cannot be reached, or refuses; the text says why.
        ConfigError, AttemptError: as `newest_claim`.
    """
    from miles_hpc.wire.operator import OperatorClient
    from miles_hpc.wire.sockets import HubUnreachable

    claim = claim or newest_claim(run_dir)
    if verdict_of(run_dir, claim.number):
        raise HubUnreachable(f"attempt {claim.number} has ended")
    if why := gone_from_here(run_dir, claim):
        raise HubUnreachable(f"attempt {claim.number} is gone: {why}")
    with OperatorClient(run_dir, claim.number, timeout_s=timeout_s) as hub:
        return question(hub)


def read_status(run_dir: Path) -> tuple[dict[str, Any] | None, str]:
    """What the hub says; what it wrote last where it does not answer; None where it wrote nothing.

    Returns:
        The status, with `source`, `age_s` (how old it is), `state` (a word of `launch.run.State`) and `reason`; and why
        the hub was not asked ("" when it was).

    Raises:
        ConfigError, AttemptError: as `newest_claim`.
    """
    from miles_hpc.wire.sockets import HubError

    claim = newest_claim(run_dir)
    try:
        reply: dict[str, Any] = msgspec.to_builtins(ask(run_dir, lambda hub: hub.status()))
        found = {"epoch": 0, "summary": {}, "outcome": "", "draining": "", **reply, "source": "hub"}
        return {**found, "state": found["outcome"] or "running", "reason": found["draining"]}, ""
    except HubError as error:
        why = str(error)
    (sign,) = look_once([(run_dir, claim)])
    written = read_json(run_dir / "status.json")
    if not written:
        return None, f"{sign.text}; {why}" if sign.died else why
    age = max(0.0, time.time() - written.get("written_at", time.time()))
    found = {"outcome": "", "draining": "", **written, "age_s": round(age, 3), "source": "status.json"}
    state, reason = _STATES[sign.life], sign.text
    if sign.verdict:
        verdict = verdict_of(run_dir, claim.number)
        state, reason = str(verdict.get("outcome", "")), str(verdict.get("reason", ""))
        found["outcome"] = state
    elif sign.life is Life.RUNNING:
        reason = found["draining"]
    other = found.get("attempt") != claim.number
    if other:
        reason = f"attempt {claim.number} has written no status yet; {reason}"
    if other or (sign.over and not written.get("outcome")):
        # A script that waits for cells to be ready must not take those of the dead for it.
        found["nodes"] = [{**row, "state": "dead"} for row in found["nodes"]]
        found["cells"] = [{**row, "state": "lost"} for row in found["cells"]]
    return {**found, "state": state, "reason": reason}, why


_STATES = {Life.RUNNING: "running", Life.WAITING: "pending", Life.ENDED: "lost", Life.UNKNOWN: "unknown"}


def said_over(claim: Attempt, sign: Sign) -> int:
    """The exit code for who has followed an attempt to its end; says on stderr when that is no verdict."""
    if sign.verdict:
        return FINISHED
    what = "died without a verdict" if sign.died else "is over without a verdict"
    print(f"miles-hpc: attempt {claim.number} {what}: {one_line(sign.text)}", file=sys.stderr, flush=True)
    return FAILED


def note_fallback(why: str, path: Path) -> None:
    """Say on stderr that a file is shown instead of the hub's answer, and how old it is."""
    try:
        age = f"{max(0.0, time.time() - path.stat().st_mtime):.1f} s old"
    except OSError:
        age = "which is not there"
    print(f"miles-hpc: note: the hub was not reached: {one_line(why)}; shown is {path}, {age}", file=sys.stderr)
