"""`miles-hpc drain`: let a run commit and stop."""

from __future__ import annotations

import argparse
import json

from miles_hpc.cli.exits import FAILED, FINISHED, refuse
from miles_hpc.cli.source import find_run
from miles_hpc.config.errors import ConfigError
from miles_hpc.launch.attempts import AttemptError
from miles_hpc.launch.run import Run, State


def drain(arguments: argparse.Namespace) -> int:
    """Ask for it; with --wait, wait for the end. Returns 0 when it was asked, or has ended in order."""
    try:
        run = Run(find_run(arguments.run))
        standing = run.standing()
        if standing.state.terminal:
            return refuse(f"{run.run_dir}: there is nothing to drain: {standing.state.value} {standing.reason}".strip())
    except (ConfigError, AttemptError, FileNotFoundError) as error:
        return refuse(str(error))
    try:
        run.drain(arguments.reason, requeue=arguments.requeue)
    except RuntimeError as error:
        refuse(str(error))
        return FAILED
    if not arguments.wait:
        if arguments.json:
            print(json.dumps({"run_dir": str(run.run_dir), "outcome": "", "reason": arguments.reason}))
        else:
            print(f"{run.run_dir} drains; see `miles-hpc status {run.run_dir}`")
        return FINISHED
    summary = run.wait()
    if arguments.json:
        print(json.dumps({"run_dir": str(run.run_dir), **summary}))
    else:
        print(f"{summary['outcome']}: {summary['reason']}")
    return FINISHED if State(summary["outcome"]) in (State.DRAINED, State.FINISHED) else FAILED
