"""The GPUs of this node: which are ours, how workers are told of theirs, and whether somebody else still uses one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_hpc.agent import procfs
from miles_hpc.agent.errand import Errand
from miles_hpc.config.node import GpuConfig
from miles_hpc.wire.messages import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
_STEP_GPUS = "SLURM_STEP_GPUS"
_KFD = Path("/dev/kfd")
"""The compute device of AMD's driver."""


class GpuError(Exception):
    """This node's GPUs cannot be used; the text says which and why."""


def find(environ: Mapping[str, str], *, wanted: bool = True) -> list[Gpu]:
    """GPUs that NVML shows and the environment allows, in the environment's order.

    Args:
        wanted: whether the run needs GPUs; one that needs none is not refused for the kind of a node's GPUs, and is
            given none then.

    Raises:
        GpuError: for GPUs in MIG mode, and for AMD's.
    """
    allowed = environ.get(VISIBLE)
    with _nvml() as nvml:
        if nvml is None:
            if wanted and _KFD.exists():
                raise GpuError(f"this node has GPUs of AMD (ROCm, {_KFD}), which are not supported yet")
            return []
        found, split = [], []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = Gpu(
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                index=index,
                name=_text(nvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            found.append(gpu)
            if _in_mig_mode(nvml, handle):
                split.append(gpu)
    if allowed is not None:
        ours = visible(found, allowed)
    else:
        # Indices of the whole node; where the job's other devices are hidden from NVML they no longer fit.
        step = visible(found, environ.get(_STEP_GPUS, ""))
        ours = step if step and len(step) == len(environ[_STEP_GPUS].split(",")) else found
    bad = [gpu for gpu in ours if gpu in split]
    if bad or (allowed or "").startswith("MIG-"):
        if wanted:
            names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in bad) or allowed
            raise GpuError(f"GPU {names} of this node is in MIG mode, which is not supported yet: ask for whole GPUs")
        return []
    return ours


def visible(found: Sequence[Gpu], allowed: str | None) -> list[Gpu]:
    """Those of `found` that a CUDA_VISIBLE_DEVICES of indices or UUIDs (also shortened) names, in its order.

    As CUDA does, the list ends at the first entry that names no GPU.
    """
    if allowed is None:
        return list(found)
    chosen = []
    for item in filter(None, (part.strip() for part in allowed.split(","))):
        match = [gpu for gpu in found if (item.isdigit() and gpu.index == int(item)) or _is_uuid(gpu.uuid, item)]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return chosen


def _is_uuid(uuid: str, item: str) -> bool:
    return item.startswith("GPU-") and uuid.startswith(item)


class NodeGpus:
    """Hands this node's GPUs to workers.

    Args:
        inherited: the CUDA_VISIBLE_DEVICES that this agent was started with.
    """

    def __init__(self, gpus: Sequence[Gpu], inherited: str | None = None, config: GpuConfig | None = None) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._by_uuid = bool(inherited) and "GPU-" in str(inherited)
        self.config = config or GpuConfig()

    def variables(self, uuids: Sequence[str]) -> dict[str, str]:
        """What a worker is told, in the form that this node's agent was told; a worker without GPUs sees none."""
        if not self._gpus:
            return {}
        unknown = [uuid for uuid in uuids if uuid not in self._gpus]
        if unknown:
            raise GpuError(f"this node has no GPU {', '.join(unknown)}; it has {', '.join(self._gpus)}")
        names = uuids if self._by_uuid else [str(self._gpus[uuid].index) for uuid in uuids]
        # NVML counts by bus id, CUDA by speed unless it is told otherwise.
        return {VISIBLE: ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def held(self, uuids: Sequence[str]) -> dict[str, str]:
        """Each of these GPUs, with "" when it is fresh or NVML does not say, else with who holds it.

        NVML may take seconds, and hangs with a driver that does: not for a loop.
        """
        found = dict.fromkeys(uuids, "")
        with _nvml() as nvml:
            if nvml is None:
                return found
            for uuid in uuids:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                if memory.free >= self.config.min_free * memory.total:
                    continue
                pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                who = ", ".join(f"pid {pid} {procfs.command_line(pid)[:80] or '(not visible here)'}" for pid in pids)
                found[uuid] = (
                    f"GPU {self._gpus[uuid].index} ({uuid}) has {memory.free >> 20} of {memory.total >> 20} MiB free, "
                    f"held by {who or 'no process that NVML shows'}"
                )
        return found


class GpuLooks:
    """Looks at the memory of GPUs, one after the other, in a thread."""

    def __init__(self, gpus: NodeGpus) -> None:
        self._gpus = gpus
        self._errand: Errand[dict[str, str]] | None = None
        self._asked: tuple[str, ...] = ()

    def pollable(self) -> list[int]:
        """Becomes readable when `take` has something."""
        return [] if self._errand is None else [self._errand.fileno]

    def ask(self, uuids: Sequence[str]) -> bool:
        """Begin a look. False: the one before has not ended."""
        if self._errand is None:
            self._errand = Errand("gpus", self._gpus.held)
        if not self._errand.ask(uuids):
            return False
        self._asked = tuple(uuids)
        return True

    def take(self) -> dict[str, str] | None:
        """What a look has found, as `NodeGpus.held`, once. An error of NVML says nothing against a GPU."""
        done = None if self._errand is None else self._errand.take()
        if done is None:
            return None
        return dict.fromkeys(self._asked, "") if done.value is None else done.value


class ReleasedGpus:
    """GPUs whose worker has stopped, until they are seen to be fresh. Without I/O.

    Args:
        patience_s: how long a driver may take to give memory back.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._released: dict[str, tuple[str, float]] = {}

    def add(self, worker: str, uuids: Sequence[str], now: float) -> None:
        """A worker has stopped."""
        self._released |= dict.fromkeys(uuids, (worker, now + self._patience_s))

    def remove(self, uuids: Sequence[str]) -> None:
        """Another worker is to start on them, which looks at them itself."""
        for uuid in uuids:
            self._released.pop(uuid, None)

    def uuids(self) -> list[str]:
        """Those to look at."""
        return list(self._released)

    def on_look(self, held: Mapping[str, str], now: float) -> list[tuple[str, str]]:
        """Take a look's result. Returns (worker that has stopped, who holds its GPU), once for each GPU."""
        kept = []
        for uuid, (worker, until) in list(self._released.items()):
            who = held.get(uuid)
            if who == "" or (who and now >= until):
                del self._released[uuid]
            if who and now >= until:
                kept.append((worker, who))
        return kept


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML's binding, initialised; None without the binding or a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the binding raises its own errors, and any of them means that no GPU can be used
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except Exception:  # most GPUs have no such mode, and say so by an error of the binding
        return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
