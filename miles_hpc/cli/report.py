"""`miles-hpc report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from miles_hpc.cli.exits import FINISHED, refuse


def report(arguments: argparse.Namespace) -> int:
    """Write the picture and the page of a run directory and print their paths."""
    from miles_hpc.postmortem.report import write_report

    run_dir = Path(arguments.run_dir)
    if not run_dir.is_dir():
        return refuse(f"report {arguments.run_dir}: no such directory: name a run directory")
    try:
        written = write_report(run_dir)
    except OSError as error:
        return refuse(f"report {arguments.run_dir}: cannot be written ({error.strerror}): check its permissions")
    for path in filter(None, (written.picture, written.page)):
        print(path)
    if written.note:
        print(f"note: {written.note}")
    return FINISHED
