"""A spec declares a pool: what its workers run, what they need, and what happens when one dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import HttpCall, PortInfo, Probe

TRAINING_GROUP = "training"
"""Driver and trainer go back to the last commit together, and the executor with them: the driver tells it so. An
executor that is lost alone comes back alone, and goes on from what the driver knows and the workers hold."""


class SchedulingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How many cells a pool has and what each of their workers occupies.

    Raises:
        ValueError: when a count is negative or a pool with workers has none per cell.
    """

    num_cells: int = 1
    num_workers_per_cell: int = 1
    num_gpus_per_worker: int = 0
    num_cpus_per_worker: float = 1.0
    placement: Literal["spread", "pack"] = "spread"
    colocate_with: str = ""
    avoid_hub_node: bool = False

    def __post_init__(self) -> None:
        if self.num_cells < 0 or self.num_workers_per_cell < 1 or self.num_gpus_per_worker < 0:
            raise ValueError(
                f"scheduling of {self.num_cells} cells x {self.num_workers_per_cell} workers x "
                f"{self.num_gpus_per_worker} GPUs is not possible"
            )


class LaunchCommandContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch command may depend on. Addresses are complete when a command is rendered."""

    cell_index: int
    worker_index: int
    local_gpu_ids: tuple[int, ...]
    self_addrs: Mapping[str, HostAndPort]
    """This worker's own ports and its cell's master ports, by port name."""
    cell_addrs: tuple[Mapping[str, HostAndPort], ...]
    """The same for each worker of the cell."""
    pool_addrs: Mapping[str, tuple[tuple[Mapping[str, HostAndPort], ...], ...]]
    """Pool id -> cells -> workers -> addresses."""
    run_dir: str
    attempt: int


class CommandWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pool whose workers are programs started with an argument list, never through a shell."""

    name: str
    category: Literal[
        "router", "session-server", "engine", "controller", "rollout-worker", "executor", "trainer", "driver"
    ]
    launch_command: Callable[[LaunchCommandContext], list[str]]
    scheduling: SchedulingSpec = msgspec.field(default_factory=SchedulingSpec)
    port_infos: tuple[PortInfo, ...] = ()
    env: Callable[[LaunchCommandContext], dict[str, str]] = lambda ctx: {}
    runtime: str = "default"
    probe: Probe = msgspec.field(default_factory=Probe)
    restart: Literal["restart", "fail_run"] = "restart"
    """What a death means: heal the cell within the budget, or end the run with a reason."""
    group: str = ""
    """Pools of one group are one unit: when any of their cells ends, all are stopped, and started again together."""
    state: Literal["stateless", "stateful"] = "stateless"
    reads: tuple[str, ...] = ()
    """Pools whose addresses the command is rendered with; this pool starts after them."""
    stop_grace: float = 5.0
    farewell: tuple[HttpCall, ...] = ()
    """Calls to the probe's port before a ready worker gets its stop signal."""
    essential_processes: tuple[str, ...] = ()
    """Texts, one of which stands in the command line of every process that a worker starts and cannot live without.
    When one ends that lived when the worker became ready, the worker is killed and healed at once."""
    meta: Callable[[int], dict[str, Any]] = lambda cell_index: {}
    """Facts about a cell that observers need; published with its addresses."""

    def __post_init__(self) -> None:
        if self.group and self.restart != "restart":
            raise ValueError(f"pool {self.name!r}: a pool of group {self.group!r} is restarted with it")
        names = [port.name for port in self.port_infos]
        if len(set(names)) != len(names):
            raise ValueError(f"pool {self.name!r} declares a port name twice: {names}")
        if self.probe.kind != "none" and self.probe.port not in names:
            raise ValueError(f"pool {self.name!r}: its probe uses port {self.probe.port!r}, which it does not declare")
