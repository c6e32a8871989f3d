"""`miles-hpc postmortem` (or `report`): what a run directory tells, without asking anybody."""

from __future__ import annotations

import argparse
from pathlib import Path

from miles_hpc.cli.exits import FINISHED, one_line, refuse


def postmortem(arguments: argparse.Namespace) -> int:
    """Say how the run ended, write the picture and the page of its directory, and print their paths."""
    from miles_hpc.postmortem.reading import read_json
    from miles_hpc.postmortem.report import write_report

    run_dir = Path(arguments.run_dir)
    asked = f"{arguments.verb} {arguments.run_dir}"
    if not run_dir.is_dir():
        return refuse(f"{asked}: no such directory: name a run directory")
    try:
        written = write_report(run_dir)
    except OSError as error:
        return refuse(f"{asked}: cannot be written ({error.strerror}): check its permissions")
    summary = read_json(run_dir / "summary.json")
    if summary.get("outcome"):
        reason = one_line(summary.get("reason") or "")
        print(f"{summary['outcome']} after {summary.get('steps', 0)} steps{f': {reason}' if reason else ''}")
    else:
        print(f"no attempt has ended with a verdict: see {run_dir / 'logs' / 'latest'}")
    for path in filter(None, (written.picture, written.page)):
        print(path)
    if written.note:
        print(f"note: {written.note}")
    return FINISHED
