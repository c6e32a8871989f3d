"""What this node has: CPUs, memory, GPUs, and whether the kernel killed something of ours for lack of memory."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.wire.messages import Gpu


@dataclass(frozen=True)
class Inventory:
    cpus: float
    memory_bytes: int
    gpus: list[Gpu]


def take(cpu_share: float = 1.0) -> Inventory:
    """Look at this machine. `cpu_share` < 1: several nodes of a local run divide it."""
    return Inventory(cpus=usable_cpus() * cpu_share, memory_bytes=int(memory_limit() * cpu_share), gpus=gpus())


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_limit() -> int:
    """Bytes that this process tree may use: the machine's memory, or the limit of its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total]
    for directory, name in ((_cgroup_v2(), "memory.max"), (_cgroup_v1(), "memory.limit_in_bytes")):
        try:
            limits.append(int((directory / name).read_text(encoding="ascii"))) if directory else None
        except (OSError, ValueError):
            continue  # no limit: "max", or the file is not there
    return min(limits)


def gpus() -> list[Gpu]:
    """GPUs that NVML shows and CUDA_VISIBLE_DEVICES allows; none without NVML's Python binding or driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the binding raises its own errors, and any of them means that no GPU can be used
        return []
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                Gpu(
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    index=index,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        nvml.nvmlShutdown()


def visible(found: list[Gpu], allowed: str | None) -> list[Gpu]:
    """Those of `found` that a CUDA_VISIBLE_DEVICES of indices or UUIDs (also shortened) names, in its order.

    As CUDA does, the list ends at the first entry that names no GPU.
    """
    if allowed is None:
        return found
    chosen = []
    for item in filter(None, (part.strip() for part in allowed.split(","))):
        match = [gpu for gpu in found if (item.isdigit() and gpu.index == int(item)) or _is_uuid(gpu.uuid, item)]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return chosen


def _is_uuid(uuid: str, item: str) -> bool:
    return item.startswith("GPU-") and uuid.startswith(item)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def oom_kills() -> int | None:
    """How often the kernel has killed in this control group for lack of memory; None where it does not say."""
    for directory, name in ((_cgroup_v2(), "memory.events"), (_cgroup_v1(), "memory.oom_control")):
        if directory is None:
            continue
        try:
            lines = (directory / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def _cgroup_v2() -> Path | None:
    return _cgroup("0::", Path("/sys/fs/cgroup"))


def _cgroup_v1() -> Path | None:
    return _cgroup("memory", Path("/sys/fs/cgroup/memory"))


def _cgroup(controller: str, mount: Path) -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller == "0::" and number == "0" and not controllers:
            return mount / path.lstrip("/")
        if controller != "0::" and controller in controllers.split(","):
            return mount / path.lstrip("/")
    return None
