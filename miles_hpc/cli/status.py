"""`miles-hpc status`, `nodes` and `cells`: where a run stands, from its hub while it lives, else from what it left."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_hpc.cli.exits import FAILED, FINISHED, one_line, refuse
from miles_hpc.cli.live import topology
from miles_hpc.cli.source import find_run, note_fallback, read_status
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError

_STATUS = (
    "run_id", "attempt", "epoch", "state", "reason", "outcome", "draining", "hub", "step", "weight_version", "nodes",
    "cells", "source", "age_s", "dropped",
)  # fmt: skip
_GONE = {
    "lost": "died without a verdict: nothing of it lives",
    "unknown": "not known whether it lives",
    "pending": "waits for its next start",
}
_CELL = ("cell", "pool", "node", "generation", "state", "workers", "restarts")
_NODE = ("node", "host", "address", "state", "silent_s", "pid", "dropped")


def status(arguments: argparse.Namespace) -> int:
    """Print the status of a run."""
    return _show(arguments, _print_status, lambda found: {key: found.get(key) for key in _STATUS})


def nodes(arguments: argparse.Namespace) -> int:
    """Print the nodes of a run."""
    return _show(arguments, _print_nodes, _node_rows)


def cells(arguments: argparse.Namespace) -> int:
    """Print the cells of a run."""
    return _show(arguments, _print_cells, _cell_rows)


def _show(
    arguments: argparse.Namespace,
    for_people: Callable[[dict[str, Any], Path], None],
    as_json: Callable[[dict[str, Any]], Any],
) -> int:
    try:
        run_dir = find_run(arguments.run)
        found, why = read_status(run_dir)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))
    if found is None:
        where = run_dir / "logs" / "latest"
        refuse(f"{run_dir}: its hub has not written a status yet ({why}): try again, or look into {where}")
        return FAILED
    if why:
        note_fallback(why, run_dir / "status.json")
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        for_people(found, run_dir)
    return FINISHED


def _print_status(found: dict[str, Any], run_dir: Path) -> None:
    print(f"run {found['run_id']}, attempt {found['attempt']}, epoch {found['epoch']}, in {run_dir}")
    print(f"{_standing(found)}, step {found['step']}, weight version {found['weight_version']}")
    _print_doubt(found)
    print(f"hub {found['hub']}, seen {found['age_s']:.1f} s ago")
    lost = {**found.get("dropped", {}), **{node["node"]: n for node in found["nodes"] if (n := node.get("dropped"))}}
    left = lost.pop("unroutable", 0)
    if lost:
        print(f"messages that did not get through: {', '.join(f'{name} {count}' for name, count in lost.items())}")
    if left:
        print(f"messages to programs that had left: {left} (as it should be where programs end or are replaced)")
    for line in topology(found["cells"], found["nodes"]):
        print(line)


def _standing(found: dict[str, Any]) -> str:
    if found["state"] == "running" and found["draining"]:
        return f"draining ({one_line(found['draining'])})"
    return str(found["state"])


def _print_doubt(found: dict[str, Any]) -> None:
    """Why a run counts as gone, or may be: what is shown below is then how it stood last."""
    if found["state"] in _GONE:
        print(f"{_GONE[found['state']]}: {one_line(found['reason'])}")


def _node_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: node.get(key) for key in _NODE} for node in found["nodes"]]


def _print_nodes(found: dict[str, Any], run_dir: Path) -> None:
    _print_doubt(found)
    placed: dict[str, int] = {}
    for cell in found["cells"]:
        placed[cell["node"]] = placed.get(cell["node"], 0) + 1
    for row in _node_rows(found):
        where = f"{row['node']:<11} {row['state']:<8} {row['address']:<15} {row['host']} pid {row['pid']}"
        print(f"{where}  heard {row['silent_s']:.1f} s ago  {placed.get(row['node'], 0)} cells")


def _cell_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: cell[key] for key in _CELL} for cell in found["cells"]]


def _print_cells(found: dict[str, Any], run_dir: Path) -> None:
    _print_doubt(found)
    for row in _cell_rows(found):
        epoch, n = row["generation"]
        pids = " ".join(str(worker["pid"]) for worker in row["workers"])
        where = f"{row['cell']:<24} {row['node']:<11} g{epoch}-{n}"
        print(f"{where}  {row['state']:<9} restarts {row['restarts']}  pid {pids}")
