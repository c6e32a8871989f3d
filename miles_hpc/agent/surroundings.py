"""What a worker finds around itself: environment, scratch directory, control group, progress counter, bounded log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from miles_hpc.agent import cgroups, procfs
from miles_hpc.agent.cgroups import WorkerGroups
from miles_hpc.agent.environs import EnvironFiles
from miles_hpc.agent.gpus import NodeGpus
from miles_hpc.agent.interfaces import collective_variables
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.scratch import Scratch
from miles_hpc.wire import progress
from miles_hpc.wire.messages import StartWorker

_PROGRESS = "progress"


class Surroundings(msgspec.Struct):
    """Those of one worker."""

    env: dict[str, str]
    scratch: Path
    group: Path | None
    progress: progress.ProgressReader
    kills_before: tuple[int | None, int | None]
    """How often the kernel had killed for lack of memory in this agent's own group, and on the machine."""
    own_kills: cgroups.Kills = msgspec.field(default_factory=cgroups.Kills)
    machine_kills: cgroups.Kills = msgspec.field(default_factory=cgroups.Kills)
    """Those counts' kills, shared by all workers of the node."""
    log_path: Path | None = None
    """Set when its log was opened."""


class NodeSurroundings:
    """Makes those of all workers of a node, and takes them away again.

    Args:
        interface: the network that collectives use.
    """

    def __init__(
        self,
        logs: LogFiles,
        scratch: Scratch,
        gpus: NodeGpus | None = None,
        groups: WorkerGroups | None = None,
        environ: Mapping[str, str] = os.environ,
        interface: str = "",
    ) -> None:
        self.gpus = gpus or NodeGpus([])
        self.scratch = scratch
        self.groups = groups or WorkerGroups(scratch.name)
        self.logs = logs
        # Of a user's own choice, in this environment or the run file's, nothing is changed.
        self._environ = {**collective_variables(interface), **environ}
        self._environ_files = EnvironFiles()
        self._own_kills, self._machine_kills = cgroups.Kills(), cgroups.Kills()

    def make(self, order: StartWorker) -> Surroundings:
        """Prepare the start of a worker.

        Raises:
            GpuError: for a GPU that this node does not have.
            OSError: when the scratch directory cannot be written.
        """
        env = {**procfs.worker_environ(self._environ), "PYTHONUNBUFFERED": "1"}
        env.update(self.gpus.variables(order.gpu_uuids))
        scratch = self.scratch.make()
        counter = scratch / _PROGRESS
        reader = progress.ProgressReader(counter)
        env.update(self.scratch.variables(scratch))
        env.update(order.env)
        env[progress.VARIABLE] = str(counter)
        # What marks it as ours comes on top (`Supervisor.spawn`).
        self._environ_files.write(self.logs.home_of(Path(f"{order.worker}.g{order.generation}.env.json")), dict(env))
        return Surroundings(
            env=env,
            scratch=scratch,
            group=self.groups.make(order.worker),
            progress=reader,
            kills_before=(cgroups.own_oom_kills(), cgroups.machine_oom_kills()),
            own_kills=self._own_kills,
            machine_kills=self._machine_kills,
        )

    def remove(self, found: Surroundings) -> None:
        """The worker is gone."""
        if found.group is not None:
            self.groups.remove(found.group)
        if found.log_path is not None:
            self.logs.release(found.log_path)
        found.progress.close()
        self.scratch.remove(found.scratch)

    def close(self) -> None:
        """Every worker is gone."""
        self._environ_files.close()
        self.logs.close()
        self.groups.close()
        self.scratch.close()


def out_of_memory(found: Surroundings, signal: int | None, *, killed_by_us: bool) -> Literal["no", "probable", "yes"]:
    """Whether the kernel killed a process of this worker because memory had run out.

    Certain by the worker's own control group. By the count of the whole agent's group it is when the worker died of
    SIGKILL that was not ours, and the count has grown since the last such death. Where neither can be read, such a
    death while the machine killed others, or waits for memory, makes it probable. To be asked once for each death.
    """
    if found.group is not None and (kills := cgroups.oom_kills(found.group)) is not None:
        return "yes" if kills else "no"
    if signal != 9 or killed_by_us:
        return "no"
    own, machine = cgroups.own_oom_kills(), cgroups.machine_oom_kills()
    own_before, machine_before = found.kills_before
    if own is not None and own_before is not None:
        return found.own_kills.explain(own_before, own)
    killed = machine is not None and machine_before is not None and found.machine_kills.explain(machine_before, machine)
    return "probable" if killed not in (False, "no") or cgroups.memory_pressure() else "no"
