"""The data of the hub's state machine: nodes, cells, clients, the outcome, and the actions of the current event."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from miles_hpc.config.schema import HealConfig
from miles_hpc.config.timing import Timing
from miles_hpc.hub.actions import EXIT_CODES, Action, Note, Outcome, Send, WriteVerdict
from miles_hpc.hub.standing import StandingState
from miles_hpc.hub.summary import Seconds, merged_summary
from miles_hpc.specs.base import CommandWorkerSpec
from miles_hpc.wire.ids import Generation, cell_id, node_id, worker_id
from miles_hpc.wire.messages import Done, Failed, FromHub, Gpu, RestartCell, StartWorker, StopCell, WorkerState

if TYPE_CHECKING:
    from miles_hpc.hub.drain import Drain
    from miles_hpc.hub.recovery import Recovery

WRITE_PATIENCE_S = 3.0
"""A verdict that is not durable after this time no longer holds up the end of the processes."""
LEAVE_SLACK_S = 5.0
"""Added to the longest stop grace: until then every agent should have said goodbye."""
FENCE_SLACK_S = 5.0
"""Added to `timing.fence` before a node that was not heard counts as rid of its stateful workers."""


NEVER_STARTED = Generation(0, 0)


class Phase(enum.Enum):
    """Where a cell stands. RESERVED, STARTING and READY cells are in the address book."""

    WAITING = "waiting"
    """Wanted; not placed yet, or held back until `retry_at`."""
    RESERVING = "reserving"
    RESERVED = "reserved"
    """All its ports are known; waits for the pools that it reads."""
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Not wanted any more."""


PUBLISHED = (Phase.RESERVED, Phase.STARTING, Phase.READY)


class RunInfo(msgspec.Struct, frozen=True):
    """What does not change while a hub lives."""

    run_id: str
    attempt: int
    epoch: int
    run_dir: str = "/nowhere"
    expected_nodes: int = 1
    spare_nodes: int = 0
    hub_node: str = "node-00000"
    package_version: str = ""
    digest: str = ""
    hub: str = ""
    """Where the hub listens, for people."""
    http: str = ""
    """URL of its HTTP pages."""
    drain_on_signal: bool = False
    """A signal is the scheduler's, which also reaches the hub, and means drain; otherwise it is the user's wish to
    end the run."""
    hosts: tuple[str, ...] = ()
    """The site's names of the first job's nodes, in their order; empty: not known."""
    drain_margin_s: float = 0.0
    """The run drains when its allocation ends in less than this."""


class Node(msgspec.Struct):
    """One agent's node. `last_heard` is on the hub's monotonic clock."""

    id: str
    index: int
    key: str
    incarnation: str
    peer: bytes
    host: str
    pid: int
    address: str
    cpus: float
    gpus: tuple[Gpu, ...]
    last_heard: float
    condition: Literal["alive", "suspect", "dead"] = "alive"
    left: bool = False
    """It said goodbye."""
    left_early: bool = False
    """It did so before the run had its outcome."""
    down: bool = False
    """Whoever lends the nodes is certain that this one does not run."""
    peer_port: int = 0
    interface: str = ""
    versions: tuple[str, str, str] = ("", "", "")
    """Of this package, Python and the kernel."""
    deaths: list[tuple[float, str]] = msgspec.field(default_factory=list)
    """When which cell lost a worker here, inside the heal window; a lost node is not among them. (An empty deque would
    be a third of a node.)"""
    quarantined: bool = False
    dropped: int = 0
    """Messages that its agent could not send or read."""
    gpu_holders: dict[int, tuple[str, Generation]] = msgspec.field(default_factory=dict)
    """GPU slot -> the worker that occupies it until it is confirmed gone."""
    strays: dict[str, Generation] = msgspec.field(default_factory=dict)
    """Workers that this node runs, or may still run, although they are not wanted there."""
    stray_pids: dict[str, int] = msgspec.field(default_factory=dict)
    """Worker -> the first process of its last stray, for people."""

    def add_stray(self, row: WorkerState) -> None:
        """A worker that is not wanted here has its GPUs until its end is confirmed, unless they were given away."""
        before = self.strays.get(row.worker)
        if before is not None and before != row.generation:
            self.release(row.worker, before)
        self.strays[row.worker], self.stray_pids[row.worker] = row.generation, row.pid
        for slot, gpu in enumerate(self.gpus):
            if gpu.uuid in row.gpu_uuids:
                self.gpu_holders.setdefault(slot, (row.worker, row.generation))

    def release(self, worker: str, generation: Generation) -> None:
        for slot in [slot for slot, holder in self.gpu_holders.items() if holder == (worker, generation)]:
            del self.gpu_holders[slot]


class Worker(msgspec.Struct):
    """One process of a placed cell."""

    id: str
    index: int
    node: str
    gpu_slots: tuple[int, ...] = ()
    keep: dict[str, int] = msgspec.field(default_factory=dict)
    ports: dict[str, int] | None = None
    order: StartWorker | None = None
    pid: int = 0
    ready: bool = False
    ended: bool = False
    """Its first process is; what it started may not be gone yet."""
    gone: bool = False
    ordered_at: float = 0.0


class Cell(msgspec.Struct):
    """A replica: desired by its spec, observed through its workers."""

    id: str
    spec: CommandWorkerSpec
    index: int
    phase: Phase = Phase.WAITING
    generation: Generation = NEVER_STARTED
    workers: list[Worker] = msgspec.field(default_factory=list)
    previous: list[Worker] = msgspec.field(default_factory=list)
    """The workers of the last generation: their places and ports are kept where possible."""
    deaths: deque[float] = msgspec.field(default_factory=deque)
    """Times of the budgeted deaths inside the window."""
    retry_at: float = 0.0
    port_losses: int = 0
    """Starts in a row that ended because another process was first on a port."""
    unplaced_since: float | None = None
    starts: int = 0
    """How often it was started; a start that an operator ordered counts only when it is the first."""
    ordered: bool = False
    """Its next start is an operator's order and no heal."""
    wanted: bool = True
    guest_of: str = ""
    """The node of another job that brought this cell; it goes with the node."""

    @property
    def pool(self) -> str:
        return self.spec.name

    @property
    def published(self) -> bool:
        return self.phase in PUBLISHED

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)


class Client(msgspec.Struct, frozen=True):
    """A program of ours that said hello."""

    worker: str
    cell: str
    generation: Generation


class Leftover(msgspec.Struct):
    """A worker that was told to stop, on a node that is heard, and is not confirmed gone."""

    pid: int
    since: float
    told: bool = False
    """It is known that it takes too long."""


class Failure(msgspec.Struct, frozen=True):
    """The run failed, says its driver; stands unless the death of another part explains it before `until`."""

    reason: str
    cell: str
    """The driver's."""
    until: float


class Core:
    """All that the hub knows. Reactions in the sibling modules change it and put actions into `out`.

    Raises:
        ValueError: when two pools have one name, or a spec asks for what this hub cannot do.
    """

    def __init__(
        self, specs: Sequence[CommandWorkerSpec], info: RunInfo, heal: HealConfig, timing: Timing, now: float
    ) -> None:
        self.info, self.heal, self.timing = info, heal, timing
        self.started_at = self.now = now
        self.specs: dict[str, CommandWorkerSpec] = {}
        self.pools: dict[str, list[Cell]] = {}
        self.cells: dict[str, Cell] = {}
        for spec in specs:
            self._add_pool(spec)
        for spec in specs:
            unknown = [pool for pool in spec.reads if pool not in self.specs]
            if unknown:
                raise ValueError(f"pool {spec.name!r} reads {unknown}, which no spec declares: {list(self.specs)}")
        self.waiting: dict[str, None] = dict.fromkeys(self.cells)
        self.reserved: dict[str, None] = {}
        self.stopping: dict[str, None] = {}
        self.leftovers: dict[tuple[str, str, Generation], Leftover] = {}
        """(Node, worker, generation) -> since when its end is waited for."""
        self.nodes: dict[str, Node] = {}
        self.left_before: frozenset[str] = frozenset()
        """Nodes of the first job that had said goodbye to an earlier hub."""
        self.down_unheard: frozenset[str] = frozenset()
        """Nodes of the first job that never said hello to this hub, and that the site calls down."""
        self.node_of_peer: dict[bytes, str] = {}
        self._cells_on: dict[str, dict[str, Cell]] = {}
        """Node -> cells that may have workers there: with thousands of cells no report may look at all of them."""
        self.clients: dict[bytes, Client] = {}
        self.begun = False
        self.book_dirty = True
        self.step = self.weight_version = 0
        self.driver_summary: dict[str, Any] = {}
        self.ready_at: float | None = None
        self.first_step_at: float | None = None
        self.group_deaths: dict[str, deque[float]] = {}
        """Group -> times of its budgeted deaths inside the window."""
        self.standing = StandingState(heard_half_at=now)
        self.held_decision: tuple[Outcome, str] | None = None
        """What this hub would have decided while it does not act."""
        self.failure: Failure | None = None
        self.recovery: Recovery | None = None
        """Of a hub that took over from another."""
        self.cleans_up = False
        """The attempt had its verdict before this hub began: nothing is left to do but to send the agents away."""
        self.drain: Drain | None = None
        self.kill_wait: float | None = None
        """What the site leaves between SIGTERM and SIGKILL, once it has said so."""
        self.outcome: Outcome | None = None
        self.outcome_reason = ""
        self.decided_at = 0.0
        self.shutdown_sent = self.leaving = False
        self.answered: dict[str, Done | Failed] = {}
        """Orders of operators by call id, the newest ones."""
        self.held: dict[str, tuple[Generation, float]] = {}
        """Cell -> the generation that takes part in a weight window, and until when orders to stop it wait."""
        self.deferred: list[StopCell | RestartCell] = []
        """Orders that wait for the end of a hold."""
        self.dropped: dict[str, int] = {}
        """What did not get through at this hub, as its shell counts it."""
        self.out: list[Action] = []

    def _add_pool(self, spec: CommandWorkerSpec) -> None:
        if spec.name in self.specs:
            raise ValueError(f"two pools are called {spec.name!r}")
        if spec.scheduling.colocate_with:
            raise ValueError(
                f"pool {spec.name!r}: colocate_with = {spec.scheduling.colocate_with!r} is not supported; "
                "give the pools GPUs of their own"
            )
        self.specs[spec.name] = spec
        self.pools[spec.name] = [
            Cell(cell_id(spec.name, index), spec, index) for index in range(spec.scheduling.num_cells)
        ]
        self.cells.update((cell.id, cell) for cell in self.pools[spec.name])

    @property
    def recovering(self) -> Recovery | None:
        """Set while it is not known what runs: nothing is placed, published or called superseded."""
        return None if self.recovery is None or self.recovery.concluded else self.recovery

    def earliest_start(self, cell: Cell) -> float:
        """Now, or later for a cell that may still run on a node that this hub has not heard: nobody may hurry it."""
        if self.recovery is None or cell.id not in self.recovery.held:
            return self.now
        return max(self.now, self.recovery.fenced_at)

    # ------------------------------------------------------------------------------------------- outgoing
    def send(self, peer: bytes, message: FromHub, *, kept: bool = False) -> None:
        """`kept`: not before the journal is durable."""
        self.out.append(Send(peer, message, kept))

    def send_node(self, node_id: str, message: FromHub) -> None:
        """To the agent of a node; a node that is gone gets nothing (it is told at its next hello)."""
        node = self.nodes.get(node_id)
        if node is not None and not node.left:
            self.send(node.peer, message)

    def note(self, event: str, level: Literal["info", "warning", "error"] = "info", **fields: Any) -> None:
        self.out.append(Note(event, fields, level))

    # -------------------------------------------------------------------------------------------- look-up
    def when_told_to_leave(self) -> Outcome:
        """How the run ends when an agent leaves by itself and takes what the run cannot do without.

        On one machine that is the user's wish to end the run; under a scheduler one node goes and the others stay.
        """
        return "failed" if self.info.drain_on_signal else "cancelled"

    def missed_hosts(self) -> list[str]:
        """Hosts that were not there at the end, whether they said so or not."""
        hosts = []
        for index in range(self.info.expected_nodes):
            node = self.nodes.get(node_id(index))
            if node is None and not self.cleans_up:
                # It has never said hello, and its task may stand still for ever.
                hosts.append(self.info.hosts[index] if index < len(self.info.hosts) else node_id(index))
            elif node is not None and (node.left_early or not node.left):
                hosts.append(node.host)
        return hosts

    def lost_hosts(self) -> list[str]:
        """Hosts whose agents are silent and never said goodbye; after a take-over also those not heard yet."""
        silent = [node.host for node in self.nodes.values() if node.condition != "alive" and not node.left]
        if self.recovery is None:
            return silent
        return silent + [host for name, host in self.hosts_by_node().items() if name not in self.nodes]

    def left_of_first_job(self) -> set[str]:
        """Nodes of the first job that have said goodbye, to whichever hub, and are not back."""
        here = {node.id for node in self.nodes.values() if node.left and node.index < self.info.expected_nodes}
        return here | (self.left_before - self.nodes.keys())

    def hosts_by_node(self) -> dict[str, str]:
        """Nodes of the first job and their hosts, where the site has named them."""
        return {node_id(index): host for index, host in enumerate(self.info.hosts[: self.info.expected_nodes])}

    def present_nodes(self) -> Iterator[Node]:
        return (node for node in self.nodes.values() if node.condition != "dead" and not node.left)

    def heartbeat_scale(self) -> float:
        """Large fleets beat slower: 5000 heartbeats a second are what one hub should read."""
        return max(1.0, max(len(self.nodes), self.info.expected_nodes) / 5000.0 / self.timing.heartbeat)

    def find(self, worker: str, generation: Generation, node_id: str | None) -> tuple[Cell, Worker] | None:
        """The worker of the current generation, or None for a stale report, another node's, or an unknown one."""
        cell = self.cells.get(worker.rpartition("-")[0])
        if cell is None or cell.generation != generation:
            return None
        for candidate in cell.workers:
            if candidate.id == worker and not candidate.gone and node_id in (None, candidate.node):
                return cell, candidate
        return None

    def workers_on(self, node: str) -> list[tuple[Cell, Worker]]:
        """The workers that are placed on a node and not known to be gone."""
        found = []
        for cell in list(self._cells_on.get(node, {}).values()):
            here = [worker for worker in cell.workers if worker.node == node]
            found += [(cell, worker) for worker in here if not worker.gone]
            if not here:
                del self._cells_on[node][cell.id]
        return found

    def remember_place(self, node: str, cell: Cell) -> None:
        """To be called for each worker that is given to a cell: `workers_on` looks nowhere else."""
        self._cells_on.setdefault(node, {})[cell.id] = cell

    def new_workers(self, cell: Cell, places: Sequence[tuple[str, tuple[int, ...]]]) -> list[Worker]:
        for node, _ in places:
            self.remember_place(node, cell)
        return [Worker(worker_id(cell.id, i), i, node, slots) for i, (node, slots) in enumerate(places)]

    # ---------------------------------------------------------------------------------------- address book
    def change_phase(self, cell: Cell, phase: Phase) -> None:
        cell.phase = phase
        self.book_dirty = True
        for collection, member in (
            (self.waiting, Phase.WAITING),
            (self.reserved, Phase.RESERVED),
            (self.stopping, Phase.STOPPING),
        ):
            if phase is member:
                collection[cell.id] = None
            else:
                collection.pop(cell.id, None)

    # ---------------------------------------------------------------------------------------------- verdict
    def healed(self) -> int:
        return sum(cell.restarts for cell in self.cells.values())

    def started(self) -> int:
        return sum(1 for cell in self.cells.values() if cell.starts)

    def decide(self, outcome: Outcome, reason: str) -> None:
        """Fix how the attempt ends. The first decision stands; later ones are consequences of it."""
        if self.outcome is not None:
            return
        if not self.standing.acts:
            # Another hub may act by now: a verdict of this one would end its run.
            self.held_decision = self.held_decision or (outcome, reason)
            self.note("decision_held", "warning", outcome=outcome, reason=reason)
            return
        self.outcome, self.outcome_reason, self.decided_at = outcome, reason, self.now
        code = EXIT_CODES[outcome]
        summary = merged_summary(
            self.driver_summary,
            outcome=outcome,
            reason=reason,
            exit_code=code,
            attempt=self.info.attempt,
            step=self.step,
            weight_version=self.weight_version,
            started=self.started(),
            healed=self.healed(),
            **self.seconds(),
        )
        if self.drain is not None and outcome == "drained":
            summary["requeue"] = self.drain.requeue
        self.note("verdict", "info" if outcome == "finished" else "error", outcome=outcome, reason=reason)
        self.out.append(WriteVerdict(outcome, reason, code, summary))

    def seconds(self) -> Seconds:
        """From the hub's start until all cells were ready, until the first step, and until now."""
        return Seconds(
            ready=self._since_start(self.ready_at),
            first_step=self._since_start(self.first_step_at),
            total=round(self.now - self.started_at, 3),
        )

    def _since_start(self, moment: float | None) -> float | None:
        return None if moment is None else round(moment - self.started_at, 3)
