"""One worker of an agent's table, and what the hub is told of it."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from miles_hpc.agent.farewell import Farewell
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.supervise import Cause, Exit
from miles_hpc.agent.surroundings import Surroundings, out_of_memory
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import HttpCall, Probe, StartWorker, WorkerExited, WorkerState

LOG_TAIL_BYTES = 64 * 1024
NO_PROBE = Probe()
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use|\[Errno 98\]|os error 98")


class Row(msgspec.Struct):
    """One worker of the table, from its reservation until it is stopped."""

    worker: str
    generation: Generation
    state: Literal["reserved", "starting", "ready", "stopping"] = "reserved"
    ports: dict[str, int] = msgspec.field(default_factory=dict)
    pid: int = 0
    log_path: str = ""
    around: Surroundings | None = None
    order: StartWorker | None = None
    """Carried out once its GPUs are fresh, or `patience` is over."""
    patience: float = 0.0
    awaited: bool = False
    """It was said that its GPUs are not fresh."""
    probe: Probe = NO_PROBE
    stateful: bool = False
    calls: list[HttpCall] = msgspec.field(default_factory=list)
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    essential: list[str] = msgspec.field(default_factory=list)
    farewell: Farewell | None = None
    """Under way: then it is stopped for the cause and text of `stop`."""
    stop: tuple[Cause, str, float | None] = ("stopped", "", None)
    gpu_uuids: list[str] = msgspec.field(default_factory=list)
    ended: WorkerExited | None = None
    """What the hub was told of its end before nothing of it was left."""

    def as_told(self) -> WorkerState:
        """Its row in the table that the hub gets."""
        return WorkerState(
            worker=self.worker,
            generation=self.generation,
            state=self.state,
            pid=self.pid,
            ports=self.ports,
            gpu_uuids=self.gpu_uuids,
        )


def report_of(row: Row, logs: LogFiles, ended: Exit, *, by_slurm: bool) -> WorkerExited:
    """What the hub is told of the end of a worker."""
    around = row.around
    tail = ""
    if around is not None and around.log_path is not None:
        tail = logs.tail(around.log_path, LOG_TAIL_BYTES)
    cause, text = ended.cause, ended.text
    if cause == "exited" and by_slurm:
        cause = "stopped_by_slurm"
    if cause == "exited" and ended.exit_code and _ADDRESS_IN_USE.search(tail[-8192:]):
        cause = "port_taken"
        text = f"another process took one of its ports {row.ports} first (EADDRINUSE); {text}".rstrip("; ")
    oom = "no" if around is None else out_of_memory(around, ended.signal, killed_by_us=ended.killed_by_us)
    return WorkerExited(
        worker=row.worker,
        generation=row.generation,
        exit_code=ended.exit_code,
        signal=ended.signal,
        oom=oom,
        cause=cause,
        text=text,
        log_path=row.log_path,
        log_tail=tail,
    )
