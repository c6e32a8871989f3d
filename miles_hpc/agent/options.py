"""What an agent is started with."""

from __future__ import annotations

from pathlib import Path

import msgspec

from miles_hpc.agent.inventory import Granted
from miles_hpc.config.node import GpuConfig
from miles_hpc.config.timing import Timing
from miles_hpc.wire.ids import node_id


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is started with."""

    run_dir: Path
    attempt: int
    node_index: int
    address: str
    """IP literal that this node's workers listen on."""
    also: tuple[str, ...] = ()
    """More addresses of this node, at which a hub on it can be reached."""
    run_id: str
    hub: bool = False
    """Start the hub on this node."""
    local_nodes: int = 1
    """Agents of this run that share this machine."""
    slurm: bool = False
    """Signals come from Slurm, which takes the allocation away: they ask for a drain."""
    guest: bool = False
    """This node's job joined a run of another one: a signal ends this node only."""
    incarnation: str
    lifeline: int = -1
    """Descriptor that reaches its end when the warden is gone."""
    timing: Timing = msgspec.field(default_factory=Timing)
    port_range: tuple[int, int] | None = None
    digest: str = ""
    """What this agent has read (`digest.run_digest`)."""
    scratch: str = ""
    """Where temporary files go if that is possible."""
    local_logs: str = ""
    """Directory on this machine that logs of workers go to first; empty: straight to the run directory."""
    gpu: GpuConfig = msgspec.field(default_factory=GpuConfig)
    wants_gpus: bool = False
    """Some pool of the run needs GPUs."""
    granted: Granted = msgspec.field(default_factory=Granted)

    @property
    def node(self) -> str:
        return node_id(self.node_index)

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs" / f"attempt-{self.attempt}" / self.node
