"""Every control message, in one file.

Frame 0 of a message is protocol version and run id (`codec.py`), frame 1 one of the structs below as tagged msgpack.
Fields are append-only and new ones have defaults, so that a reader of an older version still decodes them; structs
inside messages, too, ignore fields that they do not know. The golden bytes of each lie in the tests.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.rendezvous import Rendezvous

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all control messages."""


class PortInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One named port of a worker.

    Raises:
        ValueError: on a combination that cannot be served.
    """

    name: str
    static_port: int = 0
    allow_dynamic: bool = True
    mode: Literal["per_worker", "master"] = "per_worker"
    num_consecutive: int = 1
    offset_by_cell: bool = False

    def __post_init__(self) -> None:
        if self.allow_dynamic and self.offset_by_cell:
            raise ValueError(f"port {self.name!r}: offset_by_cell needs a fixed port, so allow_dynamic must be off")
        if not self.allow_dynamic and not self.static_port:
            raise ValueError(f"port {self.name!r}: static_port is required when allow_dynamic is off")
        if self.num_consecutive < 1:
            raise ValueError(f"port {self.name!r}: num_consecutive must be at least 1")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent sees that a worker serves: a connection to `port`, or HTTP 200 from `path` on it."""

    kind: Literal["none", "tcp", "http"] = "none"
    port: str = ""
    path: str = "/health"
    interval: float = 2.0
    timeout: float = 5.0
    threshold: int = 3
    start_deadline: float = 1800.0
    stall: float = 0.0
    """Seconds that the worker's progress counter may stand still once it is ready; 0: it has none, or is not judged."""
    silence: float = 0.0
    """Seconds that a ready worker may leave probes without an answer, where that is longer than `threshold` probes."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    index: int
    name: str = ""
    memory_bytes: int = 0


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """One row of an agent's table."""

    worker: str
    generation: Generation
    state: Literal["reserved", "starting", "ready", "stopping"]
    pid: int = 0
    ports: dict[str, int] = {}
    gpu_uuids: list[str] = []


# ---------------------------------------------------------------------------------------------- agent -> hub
class AgentHello(Message, frozen=True):
    """First message of an agent incarnation, and after each reconnect."""

    incarnation: str
    node_index: int
    node_key: str
    host: str
    pid: int
    address: str
    """IP literal that this node's workers are reached at."""
    package_version: str
    digest: str
    cpus: float = 1.0
    memory_bytes: int = 0
    gpus: list[Gpu] = []
    table: list[WorkerState] = []
    wall_s: float = 0.0
    peer_port: int = 0
    """Where this agent answers other agents; 0: it takes no part in a failover."""
    differs: list[str] = []
    """How this node differs from what the scheduler has granted, for people."""
    interface: str = ""
    """Network interface of `address`."""
    python: str = ""
    kernel: str = ""


class Heartbeat(Message, frozen=True):
    seq: int
    dropped: int = 0
    """Messages that this agent could not send or read, since its start."""


class FullTable(Message, frozen=True):
    """Anti-entropy: everything that this agent runs."""

    workers: list[WorkerState]


class PortsReserved(Message, frozen=True):
    """Answer to ReservePorts. `error` is empty, or says why no port was given (and who holds a busy fixed one)."""

    worker: str
    generation: Generation
    ports: dict[str, int] = {}
    error: str = ""


class WorkerStarted(Message, frozen=True):
    worker: str
    generation: Generation
    pid: int


class WorkerReady(Message, frozen=True):
    worker: str
    generation: Generation


class WorkerExited(Message, frozen=True):
    """A worker has ended. Pushed at once, and again when everything it started is gone."""

    worker: str
    generation: Generation
    exit_code: int | None = None
    signal: int | None = None
    oom: Literal["no", "probable", "yes"] = "no"
    cause: Literal[
        "exited",
        "stopped",
        "probe_failed",
        "start_deadline",
        "spawn_failed",
        "stopped_by_slurm",
        "port_taken",
        "process_lost",
    ] = "exited"
    """`port_taken`: another process was first on one of its ports; it is to be started again on other ports.
    `process_lost`: one of its `essential_processes` has ended before it."""
    text: str = ""
    log_path: str = ""
    log_tail: str = ""
    gone: bool = True
    """Nothing of it is left. Otherwise a report with `gone` follows."""


class Goodbye(Message, frozen=True):
    """The agent leaves on purpose; its workers are stopped."""

    reason: str = ""


class LeaseRenewed(Message, frozen=True):
    """From the agent beside the hub: the lease on the shared file system is this hub's, and was renewed."""

    counter: int


class DrainRequest(Message, frozen=True):
    """The node is about to be taken away: commit and stop. Any agent may ask; the first request counts."""

    reason: str
    deadline_s: float = 0.0
    """Seconds until everything must have stopped; 0: `timing.drain`."""
    ending: bool = False
    """The scheduler has begun to end the job: what still lives after its KillWait is killed."""


# ---------------------------------------------------------------------------------------------- hub -> agent
class Welcome(Message, frozen=True):
    node: str
    epoch: int
    heartbeat: float
    run_id: str
    attempt: int


class Refused(Message, frozen=True):
    """The hub does not accept the sender. `code` is for programs, `text` for people."""

    code: Literal["version", "run", "digest", "node_taken", "superseded", "role", "unknown", "malformed"]
    text: str


class ReservePorts(Message, frozen=True):
    worker: str
    generation: Generation
    ports: list[PortInfo]
    cell_index: int = 0
    keep: dict[str, int] = {}
    """Ports that the cell's last generation had on this node; kept where they are free."""


class HttpCall(msgspec.Struct, frozen=True, kw_only=True):
    """A POST to a worker's probe port."""

    path: str
    body: str = ""
    """JSON."""


class StartWorker(Message, frozen=True):
    worker: str
    generation: Generation
    argv: list[str]
    env: dict[str, str]
    ports: dict[str, int]
    probe: Probe
    stop_grace: float = 5.0
    gpu_uuids: list[str] = []
    stateful: bool = False
    """Killed without TERM once the hub has been silent for `timing.fence`: another one may take its place then."""
    farewell: list[HttpCall] = []
    """Made when it is ready and about to be stopped, before its stop signal."""
    essential_processes: list[str] = []
    """Texts, one of which stands in the command line of every process that it cannot live without once it is ready."""


class StopWorker(Message, frozen=True):
    worker: str
    generation: Generation
    reason: str = ""


class HeartbeatSeen(Message, frozen=True):
    """The hub's loop has handled a heartbeat; sent by `sockets.HubSocket` and taken in by `sockets.HubLink`."""

    seq: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent of the run's first job answers other agents."""

    node: str
    host: str
    address: str
    port: int


class Roster(Message, frozen=True):
    """All agents that may become or vote for the next hub; sent again whenever it changes."""

    hub_node: str
    peers: list[Peer]


class Standing(Message, frozen=True):
    """Whether the hub hears enough of the run to act: to declare dead, to place, to judge."""

    acts: bool
    lease: bool = True
    """The agent beside the hub may renew the lease."""


class Shutdown(Message, frozen=True):
    """Stop every worker, then leave with `exit_code`."""

    reason: str
    exit_code: int = 0


# ------------------------------------------------------------------------- agent -> agent, on peer ports
class PeerAsk(Message, frozen=True):
    """Do you hear the hub of this epoch?"""

    call_id: str
    node: str
    epoch: int


class PeerSays(Message, frozen=True):
    """Answer to PeerAsk."""

    call_id: str
    node: str
    epoch: int
    """Of the hub that this agent obeys."""
    hears: bool
    """It has heard a hub of at least the asked epoch within `timing.suspect`, or runs one."""


class PeerHub(Message, frozen=True):
    """There is a newer hub; needs no file system to get through."""

    hub: Rendezvous


# ------------------------------------------------------------------------- own programs (role worker) -> hub
class ClientHello(Message, frozen=True):
    """A program of ours that an agent started; it is told the addresses of all pools."""

    worker: str
    generation: Generation
    pid: int


class ClientHeartbeat(Message, frozen=True):
    seq: int


class Progress(Message, frozen=True):
    """From the driver, after each step: shown by status and kept for the summary."""

    step: int
    weight_version: int
    summary: dict[str, Any] = {}
    """The driver's part of summary.json so far: steps, reward, heldout, groups."""


class FinishRun(Message, frozen=True):
    """From the driver: the run is over."""

    outcome: Literal["finished", "failed", "drained"]
    reason: str = ""
    summary: dict[str, Any] = {}
    call_id: str = ""
    """When set, the receipt is Done with this id. A repeated id is a repeated message."""


class ReplaceCell(Message, frozen=True):
    """From the controller: this generation of a cell is of no use; stop it, and heal it within the budget."""

    cell: str
    generation: Generation
    reason: str
    call_id: str = ""
    """As in FinishRun."""


class HoldCells(Message, frozen=True):
    """From the controller, at the start of a weight window and again while it lasts: what an operator wants stopped
    among these generations is stopped when the hold is over. Replaces the sender's earlier hold; 0 seconds release."""

    cells: dict[str, Generation]
    seconds: float
    call_id: str = ""
    """As in FinishRun."""


# ------------------------------------------------------------------------- hub -> own programs
class CellAddrs(msgspec.Struct, frozen=True, kw_only=True):
    """A living cell in the address book. Published when all its ports are known, withdrawn when any worker is gone."""

    cell: str
    generation: Generation
    node: str
    ready: bool
    """Every worker's probe has passed in this generation."""
    workers: list[dict[str, HostAndPort]]
    meta: dict[str, Any] = {}


class ClientWelcome(Message, frozen=True):
    epoch: int
    run_id: str
    attempt: int


class PoolAddrs(Message, frozen=True):
    """The whole address book: pool id -> living cells in cell order."""

    revision: int
    pools: dict[str, list[CellAddrs]]
    healed: int = 0
    """Cells started again so far in this attempt."""


class Superseded(Message, frozen=True):
    """The receiver's generation has been replaced: exit."""

    reason: str = ""


class Draining(Message, frozen=True):
    """No new work: the driver ends the step that it is in, commits, and finishes the run as drained."""

    reason: str
    deadline_s: float
    """Seconds from now until the hub stops everything, committed or not."""


# ---------------------------------------------------------------------------------------------- operator
class GetStatus(Message, frozen=True):
    call_id: str


class GetCells(Message, frozen=True):
    call_id: str


class CancelRun(Message, frozen=True):
    """End the run as cancelled."""

    call_id: str
    reason: str = ""


class DrainRun(Message, frozen=True):
    """End the run as drained, after a last commit when there is time for it."""

    call_id: str
    reason: str = ""
    deadline_s: float = 0.0
    """As in DrainRequest."""
    requeue: bool = False
    """Go on in a new allocation."""


class StopCell(Message, frozen=True):
    """Stop this generation of a cell and keep it stopped until StartCell. Another generation is refused."""

    call_id: str
    cell: str
    generation: Generation
    reason: str = ""


class StartCell(Message, frozen=True):
    """A cell that an operator stopped is wanted again, with a fresh budget."""

    call_id: str
    cell: str


class RestartCell(Message, frozen=True):
    """Stop this generation of a cell and start the next one, at no cost to its budget."""

    call_id: str
    cell: str
    generation: Generation
    reason: str = ""


class GetEvents(Message, frozen=True):
    """The hub's newest events, at most `limit`, from number `since` on."""

    call_id: str
    since: int = 0
    limit: int = 1000


class GetDump(Message, frozen=True):
    """All that the hub knows, for those who look for a fault in it."""

    call_id: str


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    host: str
    address: str
    state: Literal["alive", "suspect", "dead"]
    silent_s: float
    pid: int = 0
    dropped: int = 0
    """Messages that its agent could not send or read."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    ports: dict[str, int]


class CellRow(msgspec.Struct, frozen=True, kw_only=True):
    cell: str
    pool: str
    node: str
    generation: Generation
    state: str
    workers: list[WorkerRow]
    restarts: int


class StatusReply(Message, frozen=True):
    call_id: str
    run_id: str
    attempt: int
    epoch: int
    hub: str
    step: int
    weight_version: int
    nodes: list[NodeRow]
    cells: list[CellRow]
    age_s: float
    summary: dict[str, Any] = {}
    outcome: str = ""
    draining: str = ""
    """Why the run drains; empty when it does not."""
    dropped: dict[str, int] = {}
    """What did not get through at the hub, by kind, where there is any."""
    http: str = ""
    """Where the hub's /status, /events and /metrics are."""


class CellsReply(Message, frozen=True):
    call_id: str
    cells: list[CellRow]


class EventsReply(Message, frozen=True):
    call_id: str
    events: list[dict[str, Any]]
    """Lines of hub.jsonl, oldest first."""
    next: int
    """`since` of the next question."""


class DumpReply(Message, frozen=True):
    call_id: str
    content: dict[str, Any]


class Done(Message, frozen=True):
    call_id: str


class Failed(Message, frozen=True):
    call_id: str
    text: str


FromAgent = (
    AgentHello | Heartbeat | FullTable | PortsReserved | WorkerStarted | WorkerReady | WorkerExited | Goodbye
    | DrainRequest | LeaseRenewed
)  # fmt: skip
FromClient = ClientHello | ClientHeartbeat | Progress | FinishRun | ReplaceCell | HoldCells
FromOperator = (
    GetStatus | GetCells | CancelRun | DrainRun | StopCell | StartCell | RestartCell | GetEvents | GetDump
)  # fmt: skip
ToHub = FromAgent | FromClient | FromOperator
ToAgent = (
    Welcome | Refused | ReservePorts | StartWorker | StopWorker | Shutdown | HeartbeatSeen | Roster | Standing
)  # fmt: skip
BetweenAgents = PeerAsk | PeerSays | PeerHub
ToClient = ClientWelcome | Refused | PoolAddrs | Superseded | Draining | HeartbeatSeen | Done
ToOperator = StatusReply | CellsReply | EventsReply | DumpReply | Done | Failed | Refused
FromHub = (
    Welcome | Refused | ReservePorts | StartWorker | StopWorker | Shutdown | HeartbeatSeen | Roster | Standing
    | ClientWelcome | PoolAddrs | Superseded | Draining
    | StatusReply | CellsReply | EventsReply | DumpReply | Done | Failed
)  # fmt: skip
