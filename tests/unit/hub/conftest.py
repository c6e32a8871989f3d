"""A hub state with scripted agents: plain values in and out, no socket, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.config.timing import Timing
from miles_hpc.hub.actions import Action, Leave, Note, Received, Send, Tick, WriteVerdict
from miles_hpc.hub.core import RunInfo
from miles_hpc.hub.journal import take
from miles_hpc.hub.state import HubState
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    AgentHello,
    ClientHello,
    FullTable,
    Goodbye,
    Gpu,
    Heartbeat,
    PortInfo,
    PortsReserved,
    Refused,
    ReservePorts,
    Shutdown,
    Standing,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkerState,
)


def spec(name: str, **changes: object) -> CommandWorkerSpec:
    """A pool of one cell with one worker and one port."""
    values: dict[str, object] = {
        "name": name,
        "category": "engine",
        "launch_command": lambda ctx: ["prog", name, *(a.netloc for a in ctx.self_addrs.values())],
        "port_infos": (PortInfo(name="http"),),
    }
    scheduling = {k: changes.pop(k) for k in list(changes) if k in SchedulingSpec.__struct_fields__}
    return CommandWorkerSpec(**{**values, "scheduling": SchedulingSpec(**scheduling), **changes})


@dataclass
class ScriptedAgent:
    """What an agent would do: reserve, start, become ready, stop; orders are idempotent by generation."""

    index: int
    incarnation: str
    peer: bytes
    gpus: int = 0
    table: dict[str, WorkerState] = field(default_factory=dict)
    orders: list[object] = field(default_factory=list)
    refused: Refused | None = None
    next_port: int = 20000
    next_pid: int = 100
    silent: bool = False
    left: bool = False
    reserve_error: str = ""
    backlog: list[object] = field(default_factory=list)
    """Orders that wait in its connection while it is silent."""
    stuck: set[str] = field(default_factory=set)
    """Workers that do not end, whatever it does."""

    @property
    def node(self) -> str:
        return f"node-{self.index:05d}"

    def take(self, message: object) -> list[object]:
        """Carry out one order; returns the reports."""
        self.orders.append(message)
        match message:
            case ReservePorts():
                row = self.table.get(message.worker)
                error = self.reserve_error
                if message.worker in self.stuck and row is not None and row.generation != message.generation:
                    error = f"{row.worker} of generation {row.generation} is not stopped yet"
                if error:
                    return [PortsReserved(worker=message.worker, generation=message.generation, error=error)]
                if row is None or row.generation != message.generation:
                    ports = dict(message.keep)
                    for port in message.ports:
                        if port.name not in ports:
                            self.next_port += 1
                            ports[port.name] = port.static_port or self.next_port
                    row = WorkerState(
                        worker=message.worker, generation=message.generation, state="reserved", ports=ports
                    )
                    self.table[message.worker] = row
                return [PortsReserved(worker=message.worker, generation=message.generation, ports=row.ports)]
            case StartWorker():
                row = self.table.get(message.worker)
                if row is None or row.generation != message.generation:
                    return []
                if row.state == "reserved":
                    self.next_pid += 1
                    self.table[message.worker] = row = WorkerState(
                        worker=row.worker,
                        generation=row.generation,
                        state="ready",
                        pid=self.next_pid,
                        ports=row.ports,
                        gpu_uuids=message.gpu_uuids,
                    )
                return [
                    WorkerStarted(worker=row.worker, generation=row.generation, pid=row.pid),
                    WorkerReady(worker=row.worker, generation=row.generation),
                ]
            case StopWorker():
                row = self.table.get(message.worker)
                if row is not None and row.generation == message.generation:
                    if row.worker in self.stuck and row.pid:
                        self.table[row.worker] = msgspec.structs.replace(row, state="stopping")
                        return []
                    del self.table[message.worker]
                return [WorkerExited(worker=message.worker, generation=message.generation, signal=15, cause="stopped")]
            case Shutdown():
                self.table.clear()
                self.left = True
                return [Goodbye(reason=message.reason)]
            case Refused():
                self.refused = message
        return []

    def hello(self, **changes: object) -> AgentHello:
        values: dict[str, object] = {
            "incarnation": self.incarnation,
            "node_index": self.index,
            "node_key": f"key-{self.index}",
            "host": f"host{self.index}",
            "pid": 1000 + self.index,
            "address": f"10.0.0.{self.index + 1}",
            "package_version": "",
            "digest": "",
            "cpus": 4.0,
            "gpus": [Gpu(uuid=f"GPU-{self.index}-{i}", index=i) for i in range(self.gpus)],
            "table": list(self.table.values()),
        }
        return AgentHello(**{**values, **changes})


class Fleet:
    """Drives a HubState; `sent` has every action since the last `clear`, in order, without notes."""

    def __init__(
        self,
        *specs: CommandWorkerSpec,
        nodes: int = 1,
        gpus: int = 0,
        join: bool = True,
        heal: HealConfig | None = None,
        timing: Timing | None = None,
        **info: object,
    ) -> None:
        self.now = 1000.0
        self.lease = True
        """Whether the agent beside the hub renews the lease."""
        self.specs, self.heal, self.timing = specs, heal or HealConfig(), timing or Timing()
        run = RunInfo(run_id="r", attempt=0, epoch=1, expected_nodes=nodes, **info)
        self.state = HubState(specs, run, self.heal, self.timing, self.now)
        self.core = self.state.core
        self.agents: list[ScriptedAgent] = []
        self.sent: list[Action] = []
        self.notes: list[Note] = []
        self.standings: list[Standing] = []
        self.reports: list[tuple[bytes, object]] = []
        for index in range(nodes):
            self.add_agent(index, gpus=gpus)
            if join:
                self.join(index)
        if join:
            self.settle()

    def next_hub(self, journal: bool = True) -> None:
        """The hub is gone with all it knew but its journal; one of the next epoch begins, and nobody knows it yet."""
        left = take(self.core, wall=5000.0) if journal else None
        run = msgspec.structs.replace(self.core.info, epoch=self.core.info.epoch + 1)
        self.reports.clear()
        self.state = HubState(self.specs, run, self.heal, self.timing, self.now)
        self.state.take_over(left, None, wall=5000.0)
        self.core = self.state.core
        self.clear()

    def add_agent(self, index: int, gpus: int = 0, incarnation: str = "i0") -> ScriptedAgent:
        agent = ScriptedAgent(index, incarnation, f"agent-{index}-{incarnation}".encode(), gpus=gpus)
        self.agents = [a for a in self.agents if a.index != index] + [agent]
        self.agents.sort(key=lambda a: a.index)
        return agent

    def join(self, index: int, **changes: object) -> list[Action]:
        agent = self.agents[index]
        return self.receive(agent.peer, agent.hello(**changes))

    def receive(self, peer: bytes, message: object) -> list[Action]:
        return self.apply(Received(peer, message))

    def apply(self, event: object) -> list[Action]:
        actions = self.state.apply(event, self.now)
        self.notes += [action for action in actions if isinstance(action, Note)]
        told = [action for action in actions if isinstance(action, Send) and isinstance(action.message, Standing)]
        self.standings += [action.message for action in told]
        actions = [action for action in actions if not isinstance(action, Note) and action not in told]
        self.sent += actions
        for action in actions:
            if isinstance(action, Send):
                for agent in self.agents:
                    if agent.peer != action.peer:
                        continue
                    if agent.silent:
                        agent.backlog.append(action.message)
                    else:
                        self.reports += [(agent.peer, report) for report in agent.take(action.message)]
        return actions

    def resume(self, index: int) -> None:
        """A silent agent goes on, on the connection that it had: the orders that waited there reach it."""
        agent = self.agents[index]
        agent.silent = False
        backlog, agent.backlog = agent.backlog, []
        for order in backlog:
            self.reports += [(agent.peer, report) for report in agent.take(order)]

    def settle(self) -> None:
        """Let every report reach the hub, until nothing is under way."""
        while self.reports:
            peer, report = self.reports.pop(0)
            self.receive(peer, report)

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        """Living agents beat, the hub ticks."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            for agent in self.agents:
                if not agent.silent and not agent.left:
                    self.receive(agent.peer, Heartbeat(seq=1))
            for agent in self.agents:
                if agent.stuck and not agent.silent and self.now % self.timing.anti_entropy < step:
                    self.receive(agent.peer, FullTable(workers=list(agent.table.values())))
            if self.lease:
                self.core.standing.lease_renewed_at = self.now
            self.apply(Tick())
            self.settle()

    def table(self, index: int) -> None:
        """An agent's anti-entropy message."""
        agent = self.agents[index]
        self.receive(agent.peer, FullTable(workers=list(agent.table.values())))

    def die(self, worker: str, settle: bool = True, **how: object) -> None:
        """A worker's process ends by itself."""
        for agent in self.agents:
            if worker in agent.table:
                row = agent.table.pop(worker)
                report = WorkerExited(worker=worker, generation=row.generation, **({"exit_code": 1} | how))
                if report.cause in ("exited", "port_taken"):
                    self.receive(agent.peer, msgspec.structs.replace(report, gone=False))
                self.receive(agent.peer, report)
                if settle:
                    self.settle()
                return
        raise AssertionError(f"{worker} does not run")

    def hang(self, worker: str, **how: object) -> None:
        """A worker's first process ends by itself, and something that it has started does not; or `how` says more."""
        (agent,) = [agent for agent in self.agents if worker in agent.table]
        row = agent.table[worker] = msgspec.structs.replace(agent.table[worker], state="stopping")
        agent.stuck.add(worker)
        report = {"worker": worker, "generation": row.generation, **(how or {"exit_code": 1})}
        self.receive(agent.peer, WorkerExited(**report, gone=False))
        self.settle()

    def end_at_last(self, worker: str) -> None:
        """What had hung is gone."""
        (agent,) = [agent for agent in self.agents if worker in agent.stuck]
        agent.stuck.remove(worker)
        row = agent.table.pop(worker)
        self.receive(agent.peer, WorkerExited(worker=worker, generation=row.generation, exit_code=1))
        self.settle()

    def client(self, worker: str, generation: Generation | None = None) -> bytes:
        """A program of ours says hello; returns its connection."""
        cell = self.cell(worker.rpartition("-")[0])
        peer = f"client-{worker}".encode()
        self.receive(peer, ClientHello(worker=worker, generation=generation or cell.generation, pid=1))
        return peer

    def cell(self, cell_id: str):
        return self.core.cells[cell_id]

    def phases(self) -> dict[str, str]:
        return {cell.id: cell.phase.value for cell in self.core.cells.values()}

    def places(self, pool: str) -> list[list[tuple[str, tuple[int, ...]]]]:
        return [[(w.node, w.gpu_slots) for w in cell.workers] for cell in self.core.pools[pool]]

    def clear(self) -> None:
        self.sent.clear()
        self.standings.clear()
        self.notes.clear()
        for agent in self.agents:
            agent.orders.clear()

    def orders(self, *kinds: type) -> list[object]:
        return [a.message for a in self.sent if isinstance(a, Send) and isinstance(a.message, kinds)]

    @property
    def verdicts(self) -> list[WriteVerdict]:
        return [action for action in self.sent if isinstance(action, WriteVerdict)]

    @property
    def leaves(self) -> int:
        return sum(isinstance(action, Leave) for action in self.sent)


@pytest.fixture
def fleet() -> type[Fleet]:
    return Fleet


@pytest.fixture
def pool():
    return spec
