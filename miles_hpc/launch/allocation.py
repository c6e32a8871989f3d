"""What Slurm says about the job, the step and the node that this process runs in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_MEBIBYTE = 1 << 20
_COUNTED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class NotInAllocation(Exception):
    """This process was not started by srun, or its environment does not say what is needed."""


@dataclass(frozen=True, kw_only=True)
class JobKey:
    """One start of a job: a requeued job keeps its id, and its restart count grows."""

    job_id: str
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.job_id}.{self.restart}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a step: in our jobs, one node.

    `cpus`, `memory_bytes` and `gpus` are what Slurm has granted to the job on this node; 0 where it does not say.
    """

    job: JobKey
    step: str
    index: int
    """SLURM_NODEID: the node's place in the job, from 0."""
    nodes: int
    host: str
    hosts: tuple[str, ...]
    het_group: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Task:
        """The task that srun started this process as.

        Raises:
            NotInAllocation: outside of a step, or when a variable is missing or broken; the text names it.
        """
        for name in ("SLURM_JOB_ID", "SLURM_NODEID"):
            if not environ.get(name):
                raise NotInAllocation(
                    f"{name} is not set: this command is started by srun on every node of a job "
                    "(`sbatch sbatch/rl.sbatch RUN_FILE`); on one machine use `miles-hpc run`"
                )
        hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        index = _number(environ, "SLURM_NODEID")
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_JOB_NUM_NODES", len(hosts) or 1))
        if not 0 <= index < nodes or (hosts and len(hosts) != nodes):
            raise NotInAllocation(
                f"SLURM_NODEID = {index}, {nodes} nodes and the node list {','.join(hosts)!r} do not fit together"
            )
        # The job's, not the step's (SLURM_CPUS_ON_NODE): a step that got one core by mistake is to be noticed.
        cpus = cpus_of_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""), index)
        cpus = cpus or _number(environ, "SLURM_CPUS_ON_NODE", 0)
        return cls(
            job=JobKey(job_id=environ["SLURM_JOB_ID"], restart=_number(environ, "SLURM_RESTART_COUNT", 0)),
            step=environ.get("SLURM_STEP_ID", "0"),
            index=index,
            nodes=nodes,
            host=hosts[index] if hosts else environ.get("SLURMD_NODENAME", ""),
            hosts=tuple(hosts),
            het_group=_number(environ, "SLURM_HET_GROUP_ID", 0),
            cpus=cpus,
            memory_bytes=granted_memory(environ, cpus),
            gpus=granted_gpus(environ),
        )


def expand_hosts(text: str) -> list[str]:
    """Node names of a Slurm node list, such as `gpu[001-003,7],login`, in its order."""
    if "[" not in text:
        return [name for name in text.split(",") if name]
    # Imported here: a list without brackets, and everything that is no Slurm job, needs no library.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    found: list[str] = []
    try:
        # One by one: NodeSet sorts, and the place in the list is the node's number.
        for part in _split_outside_brackets(text):
            for piece in _pieces(part):
                found += list(NodeSet(piece, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise NotInAllocation(f"{text!r} is no node list: {error}") from error
    return found


def _pieces(part: str) -> list[str]:
    """`gpu[7-8,3]` as `gpu[7-8]` and `gpu[3]`; with several brackets as it is."""
    before, _, rest = part.partition("[")
    inside, _, after = rest.partition("]")
    if not inside or "[" in after:
        return [part]
    return [f"{before}[{piece}]{after}" for piece in inside.split(",")]


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in [*parts, text[start:]] if part]


def cpus_of_node(text: str, index: int) -> int:
    """CPUs of node `index` in SLURM_JOB_CPUS_PER_NODE, such as `16(x3),8`; 0 where it does not say."""
    for count, times in _COUNTED.findall(text):
        repeated = int(times or 1)
        if index < repeated:
            return int(count)
        index -= repeated
    return 0


def granted_memory(environ: Mapping[str, str], cpus: int) -> int:
    """Bytes that the job may use on this node; 0: not limited, or not said."""
    per_node = _number(environ, "SLURM_MEM_PER_NODE", 0)
    return (per_node or _number(environ, "SLURM_MEM_PER_CPU", 0) * cpus) * _MEBIBYTE


def granted_gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this step on this node; 0: none, or not said."""
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name):
            return sum(_span(part) for part in environ[name].split(","))
    return _number(environ, "SLURM_GPUS_ON_NODE", 0)


def _span(part: str) -> int:
    first, dash, last = part.partition("-")
    return int(last) - int(first) + 1 if dash and first.isdigit() and last.isdigit() else 1


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise NotInAllocation(f"{name} = {text!r}: expected a number") from error
