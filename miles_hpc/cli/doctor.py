"""`miles-hpc doctor`: is this site, or this allocation, fit for a run? Nothing is left behind."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from miles_hpc.cli.exits import FAILED, FINISHED, refuse
from miles_hpc.config.timing import Timing
from miles_hpc.launch import checks, mesh
from miles_hpc.launch.checks import Finding


def doctor(arguments: argparse.Namespace) -> int:
    """Print one line a finding. Returns 1 when something fails, otherwise 0."""
    if arguments.node:
        return mesh.on_node(Path(arguments.node))
    directory = Path(arguments.directory).expanduser().absolute()
    if not os.access(directory, os.W_OK):
        return refuse(f"--directory {str(directory)!r}: cannot be written: name the directory where runs will be")
    found = [*checks.site_checks(Timing()), checks.accounting_check()]
    if os.environ.get("SLURM_JOB_ID"):
        reports, skews, missing = mesh.run_on_nodes(directory)
        found += missing
        for report in reports:
            found += [msgspec.structs.replace(finding, node=report.host) for finding in report.findings]
        found += checks.fleet_checks(reports, skews)
    else:
        found += checks.node_checks(directory)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        for finding in together(found):
            print(_line(finding))
    sys.stdout.flush()
    return FAILED if any(finding.level == "fail" for finding in found) else FINISHED


def together(found: list[Finding]) -> list[Finding]:
    """What many nodes say alike as one finding, its nodes counted."""
    nodes: dict[Finding, list[str]] = {}
    for finding in found:
        nodes.setdefault(msgspec.structs.replace(finding, node=""), []).append(finding.node)
    shown = []
    for finding, hosts in nodes.items():
        named = [host for host in hosts if host]
        node = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
        shown.append(msgspec.structs.replace(finding, node=node))
    return shown


def _line(finding: Finding) -> str:
    where = f" [{finding.node}]" if finding.node else ""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:<5}{finding.check}{where}: {finding.text}{remedy}"
