"""The workers of one node as the hub sees them: orders in, reports out."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from miles_hpc.agent.farewell import FAREWELL_S, Farewell
from miles_hpc.agent.gpus import GpuError, GpuLooks, ReleasedGpus
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.ports import PortError, Ports, describe_holder, is_served_by
from miles_hpc.agent.probes import Finding
from miles_hpc.agent.row import Row, report_of
from miles_hpc.agent.supervise import Cause, Exit, SpawnError, Supervisor
from miles_hpc.agent.surroundings import NodeSurroundings
from miles_hpc.agent.watches import Watches
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    Message,
    PortsReserved,
    ReservePorts,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkerState,
)

GPU_LOOK_S = 1.0
"""Seconds between two looks at GPUs whose memory somebody else still holds."""
NVML_PATIENCE_S = 10.0
"""Seconds beyond `gpu.wait_s` after which a look at GPUs that has not ended counts as one that found them held."""
_FAREWELL_LOOK_S = 0.02
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class WorkerTable:
    """Carries out the hub's orders. They are idempotent by (worker, generation); stale ones are refused.

    Args:
        send: takes a report to the hub.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        ports: Ports,
        watches: Watches,
        surroundings: NodeSurroundings,
        log: JsonLog,
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._ports = ports
        self._watches = watches
        self._surroundings = surroundings
        self._log = log
        self._send = send
        self._clock = clock
        self._gpu_looks = GpuLooks(surroundings.gpus)
        self._gpu_look_at = math.inf
        self._released = ReleasedGpus(surroundings.gpus.config.wait_s)
        self._rows: dict[str, Row] = {}

    def rows(self) -> list[WorkerState]:
        """The full table."""
        return [row.as_told() for row in self._rows.values()]

    def running(self) -> bool:
        """Whether any worker has a process."""
        return any(row.state != "reserved" for row in self._rows.values())

    # ---------------------------------------------------------------------------------------------- orders
    def on_reserve(self, order: ReservePorts, *, accept: bool) -> None:
        """Choose ports for a worker that will be started."""
        row = self._rows.get(order.worker)
        if row is not None and row.generation == order.generation:
            self._send(PortsReserved(worker=order.worker, generation=order.generation, ports=row.ports))
            return
        error = "" if accept else "the agent is leaving"
        if row is not None and row.state != "reserved":
            error = f"{order.worker} of generation {row.generation} is not stopped yet"
        elif row is not None and row.generation > order.generation:
            error = f"generation {order.generation} is older than {row.generation}, which is reserved"
        if not error:
            try:
                ports = self._ports.reserve(order.worker, order.ports, order.cell_index, order.keep)
            except PortError as failure:
                error = str(failure)
                self._rows.pop(order.worker, None)
        if error:
            self._log.write(
                "ports_refused", "warning", worker=order.worker, generation=str(order.generation), error=error
            )
            self._send(PortsReserved(worker=order.worker, generation=order.generation, error=error))
            return
        self._rows[order.worker] = Row(order.worker, order.generation, ports=ports)
        self._send(PortsReserved(worker=order.worker, generation=order.generation, ports=ports))

    def on_start(self, order: StartWorker, *, accept: bool) -> None:
        """Start a worker, on the ports that were reserved for it."""
        row = self._rows.get(order.worker)
        if row is not None and row.state != "reserved":
            if row.generation == order.generation:
                self._send(WorkerStarted(worker=row.worker, generation=row.generation, pid=row.pid))
            else:
                text = f"{order.worker} of generation {row.generation} is not stopped yet"
                self._report_unstarted(order.worker, order.generation, "spawn_failed", text)
            return
        if row is None or row.generation < order.generation:
            row = self._rows[order.worker] = Row(order.worker, order.generation)
        elif row.generation > order.generation:
            text = f"generation {order.generation} is older than {row.generation}, which is reserved"
            self._report_unstarted(order.worker, order.generation, "spawn_failed", text)
            return
        if row.order is not None:
            return  # its GPUs are waited for
        row.ports, row.stateful = order.ports, order.stateful
        row.gpu_uuids = order.gpu_uuids
        if not accept:
            self._refuse(row, "spawn_failed", "the agent is leaving")
        else:
            row.order, row.patience = order, self._clock() + self._surroundings.gpus.config.wait_s
            if order.gpu_uuids:
                self._released.remove(order.gpu_uuids)
                self._gpu_look_at = self._clock()
            else:
                self._start_when_fresh(row, order, "")

    def _start_when_fresh(self, row: Row, order: StartWorker, held: str) -> None:
        """Start a worker, or wait while somebody else holds the memory of its GPUs."""
        gpus = self._surroundings.gpus
        if held and self._clock() < row.patience:
            if not row.awaited:
                self._log.write("gpus_awaited", "warning", worker=row.worker, held=held)
            row.awaited = True
            return
        row.order = None
        if held and gpus.config.foreign == "refuse":
            text = f'not fresh within {gpus.config.wait_s:g} s: {held}; end what holds it, or set gpu.foreign = "warn"'
            self._refuse(row, "spawn_failed", text)
            return
        if held:
            self._log.write("gpus_held", "warning", worker=row.worker, held=held)
        if busy := self._ports.busy(row.worker):
            self._refuse(row, "port_taken", busy)
        elif error := self._spawn(row, order):
            self._refuse(row, "spawn_failed", error)

    def next_deadline(self) -> float:
        """When `advance` has something to do."""
        said = any(row.farewell is not None for row in self._rows.values())
        given_up = min((row.patience + NVML_PATIENCE_S for row in self._awaiting_gpus()), default=math.inf)
        return min(self._gpu_look_at, given_up, self._clock() + _FAREWELL_LOOK_S if said else math.inf)

    def pollable(self) -> list[int]:
        """Descriptors that say when `advance` has something to do."""
        return self._gpu_looks.pollable()

    def advance(self) -> None:
        """Start what waited for GPUs that have become free; stop what has been taken leave of."""
        for row in list(self._rows.values()):
            if row.farewell is not None and row.farewell.over(self._clock()):
                self._stop_now(row, *row.stop)
        held = self._gpu_looks.take()
        for row in self._awaiting_gpus():
            assert row.order is not None
            if held is not None and held.keys() >= set(row.gpu_uuids):
                self._start_when_fresh(row, row.order, "; ".join(filter(None, (held[gpu] for gpu in row.gpu_uuids))))
            elif self._clock() >= row.patience + NVML_PATIENCE_S:
                self._start_when_fresh(row, row.order, f"NVML has not answered for {NVML_PATIENCE_S:g} s")
        for worker, who in self._released.on_look(held or {}, self._clock()):
            self._log.write("gpus_not_released", "warning", worker=worker, held=who)
        waiting, released = self._awaiting_gpus(), self._released.uuids()
        if held is not None and (waiting or released):
            new = any(gpu not in held for row in waiting for gpu in row.gpu_uuids)
            self._gpu_look_at = min(self._gpu_look_at, self._clock() + (0.0 if new else GPU_LOOK_S))
        if self._clock() >= self._gpu_look_at:
            wanted = list(dict.fromkeys([*(gpu for row in waiting for gpu in row.gpu_uuids), *released]))
            # A look that is under way tells by its descriptor when it ends; then comes the next one.
            self._gpu_look_at = math.inf
            if wanted:
                self._gpu_looks.ask(wanted)

    def _awaiting_gpus(self) -> list[Row]:
        return [row for row in self._rows.values() if row.order is not None]

    def _refuse(self, row: Row, cause: Cause, text: str) -> None:
        self._forget(row)
        self._report_unstarted(row.worker, row.generation, cause, text)

    def _spawn(self, row: Row, order: StartWorker) -> str:
        """Start the process. Returns why it could not be started, or ""."""
        try:
            row.around = around = self._surroundings.make(order)
            path = around.env.get("PATH")
            if not order.argv or shutil.which(order.argv[0], path=path) is None:
                return f"program {order.argv[:1]} is not found or cannot be executed (PATH={path or ''})"
            if order.probe.kind != "none" and order.probe.port not in order.ports:
                return f"its probe uses port {order.probe.port!r}, but its ports are {sorted(order.ports)}"
            logs = self._surroundings.logs
            with logs.opened(f"{order.worker}.g{order.generation}.log") as (log, around.log_path):
                row.log_path = str(logs.home_of(around.log_path))
                process = self._supervisor.spawn(
                    order.worker,
                    order.generation,
                    order.argv,
                    around.env,
                    log,
                    stop_grace=order.stop_grace,
                    ports_free=lambda: self._ports.busy(order.worker),
                    group=around.group,
                )
        except (GpuError, SpawnError, OSError) as failure:
            return str(failure)
        row.pid, row.probe, row.calls, row.environ = process.pid, order.probe, order.farewell, order.env
        row.state, row.essential = "starting", order.essential_processes
        self._log.write(
            "worker_started",
            worker=row.worker,
            generation=str(row.generation),
            pid=row.pid,
            ports=row.ports,
            argv=order.argv,
        )
        self._send(WorkerStarted(worker=row.worker, generation=row.generation, pid=row.pid))
        if order.probe.kind == "none":
            self._ready(row)
        else:
            target = HostAndPort(self._ports.address, row.ports[order.probe.port])
            self._watches.probes.add(row.worker, row.generation, order.probe, target)
        return ""

    def on_stop(self, order: StopWorker) -> None:
        """Stop a worker; its end is reported when nothing of it is left."""
        row = self._rows.get(order.worker)
        if row is None or row.generation != order.generation:
            text = "not running on this node" if row is None else f"this node has generation {row.generation}"
            self._report_unstarted(order.worker, order.generation, "stopped", text)
        elif row.state == "reserved":
            self._forget(row)
            self._report_unstarted(order.worker, order.generation, "stopped", order.reason)
        else:
            self._stop(row, "stopped", order.reason, None)

    def stop_all(self, reason: str, grace: float | None) -> None:
        """Stop every worker, each with at most `grace` seconds between TERM and KILL."""
        for row in list(self._rows.values()):
            if row.state == "reserved":
                self._forget(row)
            else:
                own = self._supervisor.workers[row.worker].stop_grace
                self._stop(row, "stopped", reason, own if grace is None else min(own, grace))

    def fence(self, reason: str) -> None:
        """Kill every stateful worker now, without TERM: another one may be started in its place, and must be alone."""
        for row in list(self._rows.values()):
            if row.stateful and row.state == "reserved":
                self._forget(row)
            elif row.stateful:
                self._log.write("fenced", "error", worker=row.worker, generation=str(row.generation), reason=reason)
                self._stop(row, "exited", reason, 0.0)

    def _stop(self, row: Row, cause: Cause, text: str, grace: float | None) -> None:
        ready = row.state == "ready"
        self._watches.remove(row.worker)
        row.state = "stopping"
        # Where the grace is cut, there is no time to take leave.
        unhurried = grace is None or grace >= self._supervisor.workers[row.worker].stop_grace
        if row.farewell is not None and unhurried and grace != 0.0:
            return
        if ready and row.calls and cause == "stopped" and unhurried:
            target = HostAndPort(self._ports.address, row.ports[row.probe.port])
            row.stop = (cause, text, grace)
            row.farewell = Farewell(target, row.calls, row.environ, self._clock() + FAREWELL_S)
            return
        self._stop_now(row, cause, text, grace)

    def _stop_now(self, row: Row, cause: Cause, text: str, grace: float | None) -> None:
        row.farewell = None
        self._supervisor.stop(row.worker, cause, text, grace=grace)

    # --------------------------------------------------------------------------------------------- reports
    def on_finding(self, finding: Finding, *, by_slurm: bool = False) -> None:
        """A watch over a worker has decided something."""
        row = self._rows.get(finding.worker)
        if row is None or row.generation != finding.generation or row.state == "stopping":
            return
        if finding.kind == "ready":
            self._on_served(row)
        elif finding.kind == "process_lost":
            self._on_lost(row, finding, by_slurm=by_slurm)
        else:
            self._log.write(
                finding.kind, "warning", worker=row.worker, generation=str(row.generation), text=finding.text
            )
            self._stop(row, finding.kind, finding.text, None)

    def _on_served(self, row: Row) -> None:
        """Something answers on the worker's port: is it the worker?"""
        port = row.ports[row.probe.port]
        if is_served_by(port, self._supervisor.pids(row.worker)):
            self._ready(row)
        else:
            text = f"port {port} ({row.probe.port!r}) is served by another process ({describe_holder(port)})"
            self._stop(row, "port_taken", text, None)

    def _ready(self, row: Row) -> None:
        row.state = "ready"
        if row.around is not None:
            self._watches.stalls.add(row.worker, row.generation, row.around.progress.read, row.probe.stall)
        parts = [pid for pid in self._supervisor.pids(row.worker) if pid != row.pid] if row.essential else []
        found = self._watches.essentials.add(row.worker, row.generation, parts, row.essential)
        more: dict[str, Any] = {"essential": found} if row.essential else {}
        self._log.write("worker_ready", worker=row.worker, generation=str(row.generation), **more)
        self._send(WorkerReady(worker=row.worker, generation=row.generation))

    def _on_lost(self, row: Row, finding: Finding, *, by_slurm: bool) -> None:
        """What is left of a worker serves nobody, and would wait for what is gone: it is killed at once.

        The hub hears of it before it is gone, as of an end by itself.
        """
        cause: Cause = "stopped_by_slurm" if by_slurm else "process_lost"
        self._log.write(cause, "warning", worker=row.worker, generation=str(row.generation), text=finding.text)
        self._stop(row, cause, finding.text, 0.0)
        lost = Exit(row.worker, row.generation, row.pid, None, finding.signal, False, cause, finding.text, 0)
        # The signal tells whether memory had run out; the worker's own end is another one.
        row.ended = msgspec.structs.replace(
            report_of(row, self._surroundings.logs, lost, by_slurm=by_slurm), signal=None
        )
        self._send(msgspec.structs.replace(row.ended, gone=False))

    def on_ended(self, ended: Exit, *, by_slurm: bool) -> None:
        """The first process of a worker has ended by itself: the hub hears of it before the rest of it is gone."""
        # The rest of it is killed now, which is no finding.
        self._watches.remove(ended.name)
        if ended.signal in _STOPS or (ended.exit_code or 0) - 128 in _STOPS:
            return  # Slurm signals one process after the other: the agent's own signal may be about to explain this
        row = self._rows[ended.name]
        row.state = "stopping"
        row.ended = report_of(row, self._surroundings.logs, ended, by_slurm=by_slurm)
        self._send(msgspec.structs.replace(row.ended, gone=False))

    def on_overdue(self, ending: Exit, *, by_slurm: bool) -> None:
        """A worker was killed and does not end. If not the hub has begun its stop, the hub hears of it now."""
        row = self._rows[ending.name]
        if row.ended is not None or ending.cause == "stopped":
            return
        row.state = "stopping"
        row.ended = report_of(row, self._surroundings.logs, ending, by_slurm=by_slurm)
        text = f"{row.ended.text}; it was killed, and has not ended yet".lstrip("; ")
        self._send(msgspec.structs.replace(row.ended, text=text, gone=False))

    def tell_of_ends(self) -> None:
        """To a hub that says welcome, once more: what was told of ends before may be lost with the connection."""
        for row in self._rows.values():
            if row.ended is not None:
                self._send(msgspec.structs.replace(row.ended, gone=False))

    def on_exit(self, ended: Exit, *, by_slurm: bool) -> None:
        """Nothing of a worker is left."""
        row = self._rows[ended.name]
        report = row.ended or report_of(row, self._surroundings.logs, ended, by_slurm=by_slurm)
        if ended.leftovers:
            text = f"{report.text}; {ended.leftovers} processes that it had started were killed".lstrip("; ")
            report = msgspec.structs.replace(report, text=text)
        self._forget(row)
        self._send(report)
        if row.gpu_uuids:
            # Memory that stays held is said now, not when the next worker waits for it.
            self._released.add(row.worker, row.gpu_uuids, self._clock())
            self._gpu_look_at = min(self._gpu_look_at, self._clock())
        self._log.write(
            "worker_exited",
            "info" if report.cause == "stopped" else "warning",
            worker=row.worker,
            generation=str(row.generation),
            pid=ended.pid,
            exit_code=ended.exit_code,
            signal=ended.signal,
            oom=report.oom,
            cause=report.cause,
            text=report.text,
            log_path=row.log_path,
        )

    def _forget(self, row: Row) -> None:
        """The worker is gone: give back what it held."""
        self._watches.remove(row.worker)
        self._ports.release(row.worker)
        if row.around is not None:
            self._surroundings.remove(row.around)
        self._rows.pop(row.worker, None)

    def _report_unstarted(self, worker: str, generation: Generation, cause: Cause, text: str) -> None:
        self._log.write(
            "worker_not_started", "warning", worker=worker, generation=str(generation), cause=cause, text=text
        )
        self._send(WorkerExited(worker=worker, generation=generation, cause=cause, text=text))
