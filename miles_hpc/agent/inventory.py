"""What this node has, CPUs, memory and GPUs, and how that differs from what the scheduler has granted."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from miles_hpc.agent import gpus
from miles_hpc.agent.cgroups import own_groups
from miles_hpc.wire.messages import Gpu

_MEBIBYTE = 1 << 20
_MEMORY_SLACK = 0.02
"""Schedulers and kernels do not count memory alike to the page."""


class Inventory(msgspec.Struct, frozen=True):
    cpus: float
    memory_bytes: int
    gpus: list[Gpu]


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler says that this node may use; 0: not said."""

    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0


def take(
    index: int = 0, nodes: int = 1, environ: Mapping[str, str] = os.environ, *, wants_gpus: bool = False
) -> Inventory:
    """What node `index` of `nodes` nodes on this machine has.

    Raises:
        GpuError: when the run wants GPUs and those of this node cannot be used.
    """
    found = gpus.find(environ, wanted=wants_gpus)
    return Inventory(
        cpus=float(len(cpu_part(index, nodes)) or usable_cpus() / nodes),
        memory_bytes=memory_limit() // nodes,
        gpus=found[index * len(found) // nodes : (index + 1) * len(found) // nodes],
    )


def cpu_part(index: int, nodes: int) -> set[int]:
    """The CPUs of one of several nodes on this machine, none of them another's; empty when there are too few."""
    cpus = sorted(os.sched_getaffinity(0))
    return set(cpus[index * len(cpus) // nodes : (index + 1) * len(cpus) // nodes]) if len(cpus) >= nodes else set()


def differences(found: Inventory, granted: Granted) -> list[str]:
    """How a node differs from its grant, one line each."""
    lines = []
    if granted.cpus and found.cpus < granted.cpus:
        lines.append(
            f"this agent may use {found.cpus:g} of the {granted.cpus} CPUs that were granted: is --cpus-per-task "
            "missing in srun, or does something bind tasks to cores?"
        )
    elif granted.cpus and found.cpus > granted.cpus:
        lines.append(f"this agent may use {found.cpus:g} CPUs, {granted.cpus} were granted: nothing binds it to them")
    if granted.memory_bytes and found.memory_bytes < granted.memory_bytes * (1 - _MEMORY_SLACK):
        lines.append(
            f"this agent may use {found.memory_bytes // _MEBIBYTE} MiB of the {granted.memory_bytes // _MEBIBYTE} MiB "
            "that were granted: is --mem=0 missing in srun?"
        )
    # Where CPUs were granted there is a scheduler, and GPUs that it does not mention are not ours.
    if granted.gpus != len(found.gpus) and (granted.gpus or granted.cpus):
        lines.append(f"this agent sees {len(found.gpus)} GPUs, {granted.gpus} were granted to it")
    return lines


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_limit() -> int:
    """Bytes that this process tree may use: the machine's memory, or the limit of its control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in own_groups():
        # A scheduler limits the job or the step, some levels above its processes.
        for place in (group, *group.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                try:
                    limits.append(int((place / name).read_text(encoding="ascii")))
                except (OSError, ValueError):
                    continue  # no limit: "max", or the file is not there
    return min(limits)
