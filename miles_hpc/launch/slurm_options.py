"""The options of sbatch and srun that a run needs, and the ending of every batch script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_hpc.config.errors import ConflictError
from miles_hpc.config.schema import ContainerConfig, SlurmConfig

SRUN = (
    "--ntasks-per-node=1",
    # Nothing is bound: the agent divides its node among its workers.
    "--cpu-bind=none",
    "--gpu-bind=none",
    "--mem=0",
    "--mpi=none",
    # A lost node, a task that ends and a task that fails leave the others alone; the hub decides.
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--input=none",
)
# sbatch's own names for what the config has under others, or what the ending of a run depends on.
_DECIDED = {
    "nodes": "slurm.nodes",
    "ntasks-per-node": "",
    "ntasks": "",
    "array": "",
    "wrap": "",
    "no-kill": "",
    "open-mode": "",
    "signal": "slurm.signal_s",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "gpus-per-node": "slurm.gpus_per_node",
    "cpus-per-task": "slurm.cpus_per_node",
    "exclusive": "slurm.cpus_per_node",
    "mem": "slurm.memory",
    "time": "slurm.time",
    "constraint": "slurm.constraint",
    "exclude": "slurm.exclude",
    "reservation": "slurm.reservation",
}


def sbatch_options(config: SlurmConfig, name: str) -> dict[str, Any]:
    """Long option of sbatch -> value; True: an option without one.

    Raises:
        ConflictError: when slurm.additional has what another key decides.
    """
    found: dict[str, Any] = {"job-name": name, "nodes": config.nodes, "ntasks-per-node": 1}
    for option, value in (
        ("partition", config.partition),
        ("account", config.account),
        ("qos", config.qos),
        ("gpus-per-node", config.gpus_per_node),
        ("cpus-per-task", config.cpus_per_node),
        ("time", config.time),
        ("constraint", config.constraint),
        ("exclude", config.exclude),
        ("reservation", config.reservation),
    ):
        if value:
            found[option] = value
    if not config.cpus_per_node:
        found["exclusive"] = True
    additional = {key.replace("_", "-").lstrip("-"): value for key, value in config.additional.items()}
    if config.memory or not additional.keys() & {"mem-per-cpu", "mem-per-gpu"}:  # sbatch takes one of the three
        found["mem"] = config.memory or "0"
    if config.signal_s:
        found["signal"] = f"USR2@{config.signal_s}"
    found |= {"requeue" if config.requeue else "no-requeue": True, "no-kill": True}
    found |= {"propagate": "NONE", "open-mode": "append"}
    for key, value in config.additional.items():
        option = key.replace("_", "-").lstrip("-")
        if option in _DECIDED:
            other = _DECIDED[option]
            remedy = f"set {other}" if other else "leave it out"
            raise ConflictError(
                ("slurm.additional",), f"slurm.additional.{key} is decided by the run: {remedy} instead"
            )
        found[option] = value
    return found


def srun_options(config: SlurmConfig, run_dir: Path) -> list[str]:
    """Options of srun, the container's included."""
    cpus = [f"--cpus-per-task={config.cpus_per_node}"] if config.cpus_per_node else []
    return [*SRUN, *cpus, "--open-mode=append", *pyxis_options(config.container, run_dir)]


def pyxis_options(container: ContainerConfig | None, run_dir: Path) -> list[str]:
    """`--container-…` options of the pyxis plugin; none without a pyxis container."""
    if container is None or container.kind != "pyxis":
        return []
    mounts = [f"{run_dir}:{run_dir}", *container.mounts]
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        "--no-container-remap-root",
        # An image's entry point would be run in front of the agent and may never come to it.
        "--no-container-entrypoint",
        *container.arguments,
    ]


def apptainer_command(container: ContainerConfig | None, run_dir: Path, gpus: bool) -> list[str]:
    """`apptainer exec …` up to the program; empty without an apptainer container."""
    if container is None or container.kind != "apptainer":
        return []
    binds = [word for mount in (f"{run_dir}:{run_dir}", *container.mounts) for word in ("--bind", mount)]
    # The host's own environment has its interpreter and libraries in it; what the run needs goes through.
    nv = ["--nv"] if gpus else []
    return ["apptainer", "exec", *nv, *binds, *container.arguments, container.image]


def python_in(container: ContainerConfig | None, here: str) -> str:
    """The interpreter that starts the agent."""
    return here if container is None else container.python


def ending(run_dir: Path) -> list[str]:
    """Shell lines behind srun: outside of any container, since that is where scontrol is."""
    verdicts = shlex.quote(f"{run_dir}/verdicts/")
    return [
        "rc=$?",
        f"f={verdicts}$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}",
        '[ -e "$f.requeue" ] && exec scontrol requeue "$SLURM_JOB_ID"',
        '[ -e "$f.rc" ] && rc=$(cat "$f.rc")',
        'exit "$rc"',
    ]


SETUP = ("trap : TERM # the nodes drain when Slurm ends the job; this script waits for them",)


def setup_lines(given: Sequence[str]) -> list[str]:
    """The user's lines, and what the script itself needs."""
    return [*given, *SETUP]
