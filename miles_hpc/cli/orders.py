"""`miles-hpc stop`, `start` and `restart CELL`, and `dump`: what only a living hub can do."""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from miles_hpc.cli.exits import FAILED, FINISHED, refuse
from miles_hpc.cli.source import ask, find_run
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError

if TYPE_CHECKING:
    from miles_hpc.wire.messages import CellRow
    from miles_hpc.wire.operator import OperatorClient

_LOOK_EVERY_S = 0.2


def order(arguments: argparse.Namespace) -> int:
    """Carry out `arguments.verb` on a cell and, unless told otherwise, wait until it has taken effect."""
    from miles_hpc.wire.operator import HubFailed
    from miles_hpc.wire.sockets import HubError

    try:
        row, done = ask(find_run(arguments.run), lambda hub: _carry_out(hub, arguments), arguments.timeout)
    except (ConfigError, AttemptError, HubFailed) as error:
        return refuse(str(error))
    except HubError as error:
        refuse(f"the hub was not reached: {error}")
        return FAILED
    plain = msgspec.to_builtins(row)
    if arguments.json:
        print(json.dumps(plain))
    else:
        print(f"{row.cell} g{row.generation} on {row.node or 'no node'}: {row.state}")
    if not done:
        refuse(f"{row.cell} is {row.state} after {arguments.timeout:g} s (--timeout); the order stands")
        return FAILED
    return FINISHED


def _carry_out(hub: OperatorClient, arguments: argparse.Namespace) -> tuple[CellRow, bool]:
    deadline = time.monotonic() + arguments.timeout
    before = _row(hub, arguments.cell)
    if arguments.verb == "stop":
        hub.stop_cell(before.cell, before.generation, arguments.reason)
    elif arguments.verb == "start":
        hub.start_cell(before.cell)
    else:
        hub.restart_cell(before.cell, before.generation, arguments.reason)
    pause = threading.Event()
    while True:
        row = _row(hub, arguments.cell)
        wanted = "stopped" if arguments.verb == "stop" else "ready"
        done = row.state == wanted and (arguments.verb != "restart" or row.generation > before.generation)
        if done or arguments.no_wait or time.monotonic() >= deadline:
            return row, done or arguments.no_wait
        pause.wait(_LOOK_EVERY_S)


def _row(hub: OperatorClient, cell: str) -> CellRow:
    rows = hub.cells()
    for row in rows:
        if row.cell == cell:
            return row
    import difflib

    close = difflib.get_close_matches(cell, [row.cell for row in rows], n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "`miles-hpc cells` lists them"
    raise ConfigError(f"{cell}: this run has no such cell; {hint}")


def dump(arguments: argparse.Namespace) -> int:
    """Print all that the hub knows, as JSON."""
    from miles_hpc.wire.sockets import HubError

    try:
        content: dict[str, Any] = ask(find_run(arguments.run), lambda hub: hub.dump(), 10.0)
    except (ConfigError, AttemptError) as error:
        return refuse(str(error))
    except HubError as error:
        refuse(f"the hub was not reached: {error}; `miles-hpc status` and `events` show what it has written")
        return FAILED
    print(json.dumps(content, indent=None if arguments.json else 2))
    return FINISHED
