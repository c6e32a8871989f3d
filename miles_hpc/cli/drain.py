"""`miles-hpc drain`: let a run commit and stop."""

from __future__ import annotations

import argparse

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
        run.drain(arguments.reason, requeue=arguments.requeue)
    except (ConfigError, AttemptError, FileNotFoundError, RuntimeError) as error:
        return refuse(str(error))
    if not arguments.wait:
        print(f"{run.run_dir} drains; see `miles-hpc status {run.run_dir}`")
        return FINISHED
    summary = run.wait()
    print(f"{summary['outcome']}: {summary['reason']}")
    return FINISHED if State(summary["outcome"]) in (State.DRAINED, State.FINISHED) else FAILED
