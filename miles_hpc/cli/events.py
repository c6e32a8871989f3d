"""`miles-hpc events`: what the hub has seen and decided, from itself, else from the log that it wrote."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

from miles_hpc.cli.exits import FINISHED, refuse
from miles_hpc.cli.source import ask, ended, find_run, newest_attempt, note_fallback
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError
from miles_hpc.postmortem.reading import Tail

_LOOK_EVERY_S = 1.0


def events(arguments: argparse.Namespace) -> int:
    """Print the newest events of a run; with `--follow` those to come, until its verdict."""
    try:
        run_dir = find_run(arguments.run)
        attempt = newest_attempt(run_dir)
        lines, why = _read(run_dir, attempt, arguments.lines)
        if why:
            note_fallback(why, _log(run_dir, attempt))
        shown = _print(lines, -1.0, arguments.json)
        pause = threading.Event()
        while arguments.follow:
            # Looked at first: what was written before the verdict is then read by the last turn.
            last = ended(run_dir, attempt)
            shown = _print(_read(run_dir, attempt, 1000)[0], shown, arguments.json)
            if last:
                break
            pause.wait(_LOOK_EVERY_S)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))
    return FINISHED


def _log(run_dir: Path, attempt: int) -> Path:
    return run_dir / "logs" / f"attempt-{attempt}" / "hub.jsonl"


def _read(run_dir: Path, attempt: int, limit: int) -> tuple[list[dict[str, Any]], str]:
    """The newest events, oldest first, and why they are not from the hub ("" when they are)."""
    from miles_hpc.wire.sockets import HubError

    try:
        return ask(run_dir, lambda hub: hub.events(limit=limit)[0]), ""
    except HubError as error:
        return Tail(_log(run_dir, attempt)).read()[-limit:], str(error)


def _print(lines: list[dict[str, Any]], after: float, as_json: bool) -> float:
    """Print what is younger than `after`; returns the time of the youngest line."""
    from miles_hpc.hub.eventlog import for_people

    for line in lines:
        when = float(line.get("time", 0.0))
        if when > after:
            print(json.dumps(line) if as_json else for_people(line), flush=True)
    return max([after, *(float(line.get("time", 0.0)) for line in lines)])
