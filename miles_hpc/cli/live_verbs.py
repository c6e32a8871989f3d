"""The verbs that look at a run or steer it: their arguments. Each names the module that does the work."""

from __future__ import annotations

import argparse
from typing import Any

from miles_hpc.cli.parsing import count, seconds

_RUN = "run directory or id (default: the only one running)"


def add_live_verbs(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add status, nodes, cells, logs, events, stop, start, restart and dump."""
    for verb, text in (
        ("status", "where a run stands"),
        ("nodes", "the nodes of a run, and when each was last heard"),
        ("cells", "what a run's cells are doing"),
    ):
        _verb(verbs, verb, f"status:{verb}", text)

    logs = verbs.add_parser("logs", help="what the processes of a run have written")
    logs.set_defaults(call="logs:logs")
    logs.add_argument(
        "target", nargs="?", default="", help="a cell, worker, pool, node, or `hub` (default: all of them)"
    )
    logs.add_argument("run", nargs="?", default="", help=_RUN)
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is added, until the run's end")
    logs.add_argument("-n", "--lines", type=count, default=20, help="last lines of each log (default: 20)")
    logs.add_argument("--all", action="store_true", help="also the earlier generations of a worker")
    logs.add_argument("--attempt", type=count, default=None, help="of an earlier attempt (default: the newest)")
    logs.add_argument("--json", action="store_true", help="one JSON object a line")

    events = _verb(verbs, "events", "events:events", "what the hub has seen and decided")
    events.add_argument("-f", "--follow", action="store_true", help="go on with those to come, until the run's end")
    events.add_argument("-n", "--lines", type=count, default=50, help="newest events (default: 50)")

    for verb, text in (
        ("stop", "stop a cell and keep it stopped"),
        ("start", "start a cell that was stopped"),
        ("restart", "stop a cell and start it again, at no cost to its budget"),
    ):
        order = verbs.add_parser(verb, help=text)
        order.set_defaults(call="orders:order")
        order.add_argument("cell", metavar="CELL", help="id of the cell, as `miles-hpc cells` shows it")
        order.add_argument("run", nargs="?", default="", help=_RUN)
        order.add_argument("--reason", default="", help="for the hub's log")
        order.add_argument("--no-wait", action="store_true", help="return when the hub has taken the order")
        order.add_argument("--timeout", type=seconds, default=60.0, help="seconds to wait for the effect (default: 60)")
        order.add_argument("--json", action="store_true", help="as JSON")

    _verb(verbs, "dump", "orders:dump", "all that the hub knows, as JSON, for those who look for a fault in it")


def _verb(verbs: argparse._SubParsersAction[Any], verb: str, call: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = verbs.add_parser(verb, help=text)
    command.set_defaults(call=call)
    command.add_argument("run", nargs="?", default="", help=_RUN)
    command.add_argument("--json", action="store_true", help="as JSON")
    return command
