"""`miles-hpc status` and `cells`: where a run stands, from its hub while it lives, else from what it left."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.cli.exits import FAILED, FINISHED, one_line, refuse
from miles_hpc.cli.live import topology
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError, is_live, read_attempts, registered_runs
from miles_hpc.postmortem.reading import read_json

_STATUS = ("run_id", "attempt", "epoch", "hub", "step", "weight_version", "nodes", "cells", "age_s")
_CELL = ("cell", "pool", "node", "generation", "state", "workers", "restarts")


def status(arguments: argparse.Namespace) -> int:
    """Print the status of a run."""
    try:
        run_dir = find_run(arguments.run)
        found = read_status(run_dir)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))
    if found is None:
        return _nothing_yet(run_dir)
    if arguments.json:
        print(json.dumps({key: found[key] for key in _STATUS}))
        return FINISHED
    print(f"run {found['run_id']}, attempt {found['attempt']}, epoch {found['epoch']}, in {run_dir}")
    print(f"{found.get('outcome') or 'running'}, step {found['step']}, weight version {found['weight_version']}")
    print(f"hub {found['hub']}, seen {found['age_s']:.1f} s ago")
    for line in topology(found["cells"], found["nodes"]):
        print(line)
    return FINISHED


def cells(arguments: argparse.Namespace) -> int:
    """Print the cells of a run."""
    try:
        run_dir = find_run(arguments.run)
        found = read_status(run_dir)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))
    if found is None:
        return _nothing_yet(run_dir)
    rows = [{key: cell[key] for key in _CELL} for cell in found["cells"]]
    if arguments.json:
        print(json.dumps(rows))
        return FINISHED
    for row in rows:
        epoch, n = row["generation"]
        pids = " ".join(str(worker["pid"]) for worker in row["workers"])
        where = f"{row['cell']:<24} {row['node']:<11} g{epoch}-{n}"
        print(f"{where}  {row['state']:<9} restarts {row['restarts']}  pid {pids}")
    return FINISHED


def _nothing_yet(run_dir: Path) -> int:
    print(f"miles-hpc: {run_dir}: its hub has not written a status yet: try again, or look into {run_dir}/logs/latest")
    return FAILED


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


def _lives(run_dir: Path) -> bool:
    try:
        attempts = read_attempts(run_dir)
    except (AttemptError, OSError):
        return False
    return bool(attempts) and is_live(attempts[-1])


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """What the hub says; what it wrote last where it does not answer; None where it wrote nothing.

    `age_s` is how old the answer is.
    """
    from miles_hpc.wire.operator import OperatorClient
    from miles_hpc.wire.sockets import HubError

    if _lives(run_dir):
        try:
            with OperatorClient(run_dir, timeout_s=3.0) as hub:
                reply: dict[str, Any] = msgspec.to_builtins(hub.status())
                return {"epoch": 0, "summary": {}, "outcome": "", **reply}
        except HubError:
            pass  # starting, ending or stuck: its last words are on disk
    written = read_json(run_dir / "status.json")
    if not written:
        return None
    return {**written, "age_s": round(max(0.0, time.time() - written.get("written_at", time.time())), 3)}
