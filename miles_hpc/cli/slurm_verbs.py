"""The verbs that have to do with Slurm: their arguments. Each names the module that does the work."""

from __future__ import annotations

import argparse
from typing import Any

from miles_hpc.cli.parsing import add_files

SUBMIT_OPTIONS: dict[str, type] = {
    "partition": str,
    "account": str,
    "qos": str,
    "nodes": int,
    "gpus_per_node": int,
    "cpus_per_node": int,
    "memory": str,
    "time": str,
    "constraint": str,
    "exclude": str,
    "reservation": str,
}
"""Keys of `[slurm]` that have an option of their own."""


def add_slurm_verbs(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add submit, drain and doctor."""
    submit = verbs.add_parser("submit", help="run a recipe or your own run files as a Slurm job")
    submit.set_defaults(call="submit:submit_verb")
    add_files(submit)
    submit.add_argument("--run-dir", metavar="DIR", default="", help="on a shared file system (default: runs/<run id>)")
    submit.add_argument("--resume", action="store_true", help="continue the run in --run-dir from its last commit")
    submit.add_argument("--dry-run", action="store_true", help="print script, config, placement and commands only")
    submit.add_argument("--wait", action="store_true", help="wait for the end, over all requeues")
    submit.add_argument("--json", action="store_true", help="job id and run directory as JSON")
    for key, kind in SUBMIT_OPTIONS.items():
        submit.add_argument(
            f"--{key.replace('_', '-')}", type=kind, default=None, metavar="N" if kind is int else "X",
            help=f"sets slurm.{key}",
        )  # fmt: skip

    drain = verbs.add_parser("drain", help="let a run commit and stop")
    drain.set_defaults(call="drain:drain")
    drain.add_argument("run", nargs="?", default="", help="run directory or id (default: the only one running)")
    drain.add_argument("--reason", default="", help="for the hub's log and the verdict")
    drain.add_argument("--requeue", action="store_true", help="put the job into the queue again")
    drain.add_argument("--wait", action="store_true", help="wait for the end")
    drain.add_argument("--json", action="store_true", help="as JSON")

    doctor = verbs.add_parser("doctor", help="is this site, or the allocation around this command, fit for a run?")
    doctor.set_defaults(call="doctor:doctor")
    doctor.add_argument("--directory", default=".", help="where run directories will be (default: here)")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.add_argument("--node", default="", help=argparse.SUPPRESS)
