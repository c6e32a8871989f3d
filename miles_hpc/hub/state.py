"""The hub's state machine: events in, actions out. Nothing here opens, sleeps, logs or reads a clock."""

from __future__ import annotations

from collections.abc import Sequence

from miles_hpc.config.schema import HealConfig
from miles_hpc.config.timing import Timing
from miles_hpc.hub import drain, healing, journal, leftovers, lifecycle, membership, operator, recovery, standing
from miles_hpc.hub.actions import Action, Event, HubBroke, HubSignalled, Leave, Outcome, Received, Tick, VerdictWritten
from miles_hpc.hub.core import LEAVE_SLACK_S, WRITE_PATIENCE_S, Client, Core, RunInfo
from miles_hpc.hub.render import address_book
from miles_hpc.hub.site import SiteSeen
from miles_hpc.specs.base import CommandWorkerSpec
from miles_hpc.wire.ids import cell_of, node_id
from miles_hpc.wire.messages import (
    AgentHello,
    CellAddrs,
    ClientHeartbeat,
    ClientHello,
    ClientWelcome,
    DrainRequest,
    FinishRun,
    FromOperator,
    FullTable,
    Goodbye,
    Heartbeat,
    HoldCells,
    LeaseRenewed,
    PoolAddrs,
    PortsReserved,
    Progress,
    Refused,
    ReplaceCell,
    Superseded,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)

OWN_LAG_S = 1.0
"""A hub that did nothing for longer than this was itself stalled, and judges nobody by that time."""

_FromAgent = (
    Heartbeat | FullTable | PortsReserved | WorkerStarted | WorkerReady | WorkerExited | Goodbye | DrainRequest
    | LeaseRenewed
)  # fmt: skip
_FromClient = ClientHeartbeat | Progress | FinishRun | HoldCells | ReplaceCell


class HubState:
    """Desired against observed cells of one attempt.

    Args:
        now: the hub's monotonic clock, in seconds; never goes back between calls.

    Raises:
        ValueError: when the specs contradict each other.
    """

    def __init__(
        self, specs: Sequence[CommandWorkerSpec], info: RunInfo, heal: HealConfig, timing: Timing, now: float
    ) -> None:
        self.core = Core(specs, info, heal, timing, now)
        self.revision = 0
        self.book: dict[str, list[CellAddrs]] = {}
        if info.epoch > 1:
            self.core.recovery = recovery.Recovery(claimed_at=now)

    def take_over(self, last: journal.Journal | None, verdict: Outcome | None, wall: float) -> None:
        """Go on where the last hub of this attempt was.

        Args:
            last: its journal, if one could be read.
            verdict: how the attempt has ended already; then this hub only sends the agents away.
            wall: the wall clock now.
        """
        core = self.core
        if verdict is not None:
            core.outcome, core.decided_at = verdict, core.now
            core.shutdown_sent = core.cleans_up = True
        if last is not None:
            journal.restore(core, last, wall)

    def apply(self, event: Event, now: float) -> list[Action]:
        """What to do about an event, in order."""
        core = self.core
        lag = now - core.now
        core.now = now
        if lag > OWN_LAG_S:
            for node in core.nodes.values():
                node.last_heard += lag
            for leftover in core.leftovers.values():
                leftover.since += lag
            core.note("hub_stalled", "warning", seconds=round(lag, 3))
        if isinstance(event, Received) and isinstance(event.message, Heartbeat) and self._is_well(event):
            out, core.out = core.out, []
            return out
        match event:
            case Received(peer, message):
                self._on_message(peer, message)
            case VerdictWritten():
                self._send_shutdown()
            case HubSignalled(name):
                self._on_signal(name)
            case HubBroke(text):
                core.decide("failed", f"the hub itself failed, please report it: {text}")
            case SiteSeen(seconds_left, down_hosts, kill_wait):
                core.kill_wait = kill_wait
                if seconds_left is not None:
                    drain.on_time_left(core, seconds_left)
                membership.on_down_hosts(core, down_hosts)
            case Tick():
                membership.watch_silence(core)
                standing.watch(core)
                healing.watch_quarantine(core)
                self._watch_recovery()
                leftovers.watch(core)
                self._watch_start()
                operator.carry_out_deferred(core)
        if core.outcome is None and not core.recovering:
            if core.standing.acts:
                lifecycle.advance(core)
                drain.watch(core)
                healing.watch_failure(core)
            self._publish()
        self._watch_end()
        out, core.out = core.out, []
        return out

    # -------------------------------------------------------------------------------------------- messages
    def _is_well(self, event: Received) -> bool:
        """Whether a heartbeat comes from a node that was well before: then there is nothing to decide. Thousands come
        in a second."""
        core, message = self.core, event.message
        node = core.nodes.get(core.node_of_peer.get(event.peer, ""))
        if node is None or node.condition != "alive" or node.left or core.recovering is not None:
            return False
        assert isinstance(message, Heartbeat)
        node.last_heard, node.dropped = core.now, message.dropped
        return True

    def _on_message(self, peer: bytes, message: object) -> None:
        core = self.core
        if isinstance(message, AgentHello):
            membership.on_hello(core, peer, message)
        elif isinstance(message, ClientHello):
            self._on_client_hello(peer, message)
        elif isinstance(message, _FromAgent):
            node_name = core.node_of_peer.get(peer)
            if node_name is None:
                core.send(peer, Refused(code="unknown", text="this hub knows no agent on this connection: say hello"))
            else:
                self._on_agent(node_name, message)
        elif isinstance(message, _FromClient):
            client = core.clients.get(peer)
            if client is None:
                core.send(peer, Superseded(reason="this hub knows no current worker on this connection"))
            else:
                self._on_client(peer, client, message)
        else:
            assert isinstance(message, FromOperator)
            operator.on_operator(core, peer, message)

    def _on_agent(self, node_name: str, message: _FromAgent) -> None:
        core = self.core
        node = core.nodes[node_name]
        if node.left:
            return  # it still beats while it waits for the hub's own end
        membership.on_heard(core, node)
        if core.recovering is not None and not isinstance(message, DrainRequest | Goodbye | LeaseRenewed):
            recovery.on_report(core.recovering, node, message)
            return
        match message:
            case Heartbeat():
                node.dropped = message.dropped
            case FullTable():
                membership.on_full_table(core, node, message.workers)
            case PortsReserved():
                lifecycle.on_ports(core, message, node_name)
            case WorkerStarted():
                lifecycle.on_started(core, message.worker, message.generation, message.pid, node_name)
            case WorkerReady():
                lifecycle.on_ready(core, message.worker, message.generation, node_name)
            case WorkerExited():
                lifecycle.on_exited(core, message, node_name)
            case Goodbye():
                membership.on_goodbye(core, node, message.reason)
            case LeaseRenewed() if node_name == core.info.hub_node:
                core.standing.lease_renewed_at = core.now
            case DrainRequest():
                drain.begin(core, message.reason, message.deadline_s, node_name, ending=message.ending)

    def _on_client_hello(self, peer: bytes, hello: ClientHello) -> None:
        core = self.core
        if core.recovering is not None:
            core.recovering.clients[peer] = hello
            return
        found = core.find(hello.worker, hello.generation, None)
        if found is None or not found[0].published:
            core.note("client_superseded", "warning", worker=hello.worker, generation=str(hello.generation))
            core.send(peer, Superseded(reason=f"{hello.worker} g{hello.generation} is not the current generation"))
            return
        for earlier in [p for p, client in core.clients.items() if client.worker == hello.worker]:
            del core.clients[earlier]
        core.clients[peer] = Client(hello.worker, cell_of(hello.worker), hello.generation)
        info = core.info
        core.send(peer, ClientWelcome(epoch=info.epoch, run_id=info.run_id, attempt=info.attempt))
        core.send(peer, self._pool_addrs())
        drain.tell(core, peer)

    def _on_client(self, peer: bytes, client: Client, message: _FromClient) -> None:
        core = self.core
        match message:
            case Progress():
                core.step, core.weight_version = message.step, message.weight_version
                if message.summary:
                    core.driver_summary = message.summary
                if core.first_step_at is None and message.step > 0:
                    core.first_step_at = core.now
            case FinishRun():
                if message.summary:
                    core.driver_summary = message.summary
                healing.on_finish(core, client.cell, message)
            case HoldCells():
                operator.on_hold(core, message)
            case ReplaceCell():
                lifecycle.on_replace(core, message.cell, message.generation, message.reason, client.worker)

    # ---------------------------------------------------------------------------------------- address book
    def _pool_addrs(self) -> PoolAddrs:
        return PoolAddrs(revision=self.revision, pools=self.book, healed=self.core.healed())

    def _publish(self) -> None:
        core = self.core
        if not core.book_dirty:
            return
        core.book_dirty = False
        book = address_book(core)
        if book == self.book:
            return
        self.book, self.revision = book, self.revision + 1
        news = self._pool_addrs()
        for peer in core.clients:
            core.send(peer, news)

    # ------------------------------------------------------------------------------------- start and end
    def _on_signal(self, name: str) -> None:
        """The first ends the run; one that comes after the agents were sent away ends the wait for them."""
        core = self.core
        if core.info.drain_on_signal:
            drain.begin(core, f"the hub got {name}", 0.0, "signal", ending=name in ("SIGTERM", "SIGINT"))
        else:
            core.decide("cancelled", f"the hub got {name}")
        if core.shutdown_sent and not core.leaving:
            self._leave()

    def _leave(self) -> None:
        core = self.core
        core.leaving = True
        core.note("leaving", agents_left_behind=[node.id for node in core.present_nodes()])
        core.out.append(Leave())

    def _watch_recovery(self) -> None:
        core = self.core
        if core.recovery is None or core.outcome is not None:
            return
        recovery.watch(core, core.recovery)
        if core.recovery.concluded and core.recovery.clients:
            lifecycle.advance(core)
            self._publish()
            waiting, core.recovery.clients = core.recovery.clients, {}
            for peer, hello in waiting.items():
                self._on_client_hello(peer, hello)

    def _watch_start(self) -> None:
        core = self.core
        if core.begun or core.outcome is not None or core.now - core.started_at <= core.timing.join:
            return
        if core.recovery is not None:
            # `started_at` is the first hub's: nodes that a later hub has not heard of yet are not late.
            return
        wanted = {node_id(index) for index in range(core.info.expected_nodes)}
        missing = sorted(wanted - {node.id for node in core.present_nodes()})
        hosts = dict(zip(sorted(wanted), core.info.hosts, strict=False))
        named = [f"{node} ({hosts[node]})" if node in hosts else node for node in missing[:8]]
        core.decide(
            "failed",
            f"{core.info.expected_nodes - len(missing)} of {core.info.expected_nodes} nodes said hello within "
            f"{core.timing.join:g} s (timing.join); missing: {', '.join(named)}; "
            "look at the agents' logs under logs/",
        )

    def _send_shutdown(self) -> None:
        core = self.core
        if core.shutdown_sent or core.outcome is None:
            return
        core.shutdown_sent = True
        order = membership.shutdown_order(core)
        for node in core.nodes.values():
            core.send_node(node.id, order)

    def _watch_end(self) -> None:
        core = self.core
        if core.outcome is None or core.leaving:
            return
        waited = core.now - core.decided_at
        if not core.shutdown_sent and waited > WRITE_PATIENCE_S:
            core.note("verdict_slow", "warning", seconds=round(waited, 3))
            self._send_shutdown()
        if not core.shutdown_sent:
            return
        patience = max((spec.stop_grace for spec in core.specs.values()), default=0.0) + LEAVE_SLACK_S
        # A hub of a later epoch knows the end before it knows the agents, who would wait for it for `hub_grace`.
        awaited = core.info.epoch > 1 and waited <= core.timing.dead and recovery.unheard_nodes(core)
        if waited > patience or not (awaited or any(core.present_nodes())):
            self._leave()
