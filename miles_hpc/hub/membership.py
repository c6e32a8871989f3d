"""Nodes: who is let in, who is silent, and what an agent's table says against what the hub knows."""

from __future__ import annotations

from collections.abc import Collection
from sys import intern

from miles_hpc.hub import elastic, lifecycle, recovery, standing
from miles_hpc.hub.actions import EXIT_CODES
from miles_hpc.hub.core import FENCE_SLACK_S, Cell, Core, Node, Phase, Worker
from miles_hpc.hub.healing import Ending
from miles_hpc.wire.ids import Generation, node_id
from miles_hpc.wire.messages import AgentHello, Refused, Shutdown, StopWorker, Welcome, WorkerState


def on_hello(core: Core, peer: bytes, hello: AgentHello) -> None:
    """Let an agent in, or say by name why not."""
    refusal = _refusal(core, peer, hello)
    if refusal is not None:
        core.note("agent_refused", "warning", node_index=hello.node_index, host=hello.host, reason=refusal.text)
        core.send(peer, refusal)
        return
    name = node_id(hello.node_index)
    before = core.nodes.get(name)
    node = Node(
        id=name,
        index=hello.node_index,
        key=hello.node_key,
        incarnation=hello.incarnation,
        peer=peer,
        host=hello.host,
        pid=hello.pid,
        address=hello.address,
        cpus=hello.cpus,
        gpus=tuple(hello.gpus),
        last_heard=core.now,
        peer_port=hello.peer_port,
        # Thousands of nodes say the same.
        interface=intern(hello.interface),
        versions=(intern(hello.package_version), intern(hello.python), intern(hello.kernel)),
    )
    same = before is not None and before.incarnation == hello.incarnation
    if before is not None:
        core.node_of_peer.pop(before.peer, None)
        node.gpu_holders = before.gpu_holders
        node.strays, node.stray_pids = before.strays, before.stray_pids
        node.deaths, node.quarantined = before.deaths, before.quarantined
    core.nodes[name] = node
    core.node_of_peer[peer] = name
    core.note("agent_joined", node=name, host=hello.host, pid=hello.pid, incarnation=hello.incarnation, again=same)
    for text in hello.differs:
        core.note("node_differs", "warning", node=name, host=hello.host, text=text)
    core.send(peer, welcome(core, node))
    standing.on_hello(core, node.id)
    elastic.on_hello(core, node, hello.table)
    if core.shutdown_sent:
        core.send(peer, shutdown_order(core))
        return
    if core.recovering is not None:
        recovery.on_table(core.recovering, node, hello.table)
        return
    _reconcile(core, node, hello.table, after_hello=True, same_incarnation=same)
    # The cheap half first: thousands of nodes say hello one after the other.
    wanted = core.info.expected_nodes
    if not core.begun and len(core.nodes) >= wanted and len(list(core.present_nodes())) >= wanted:
        core.begun = True
        core.note("all_nodes_joined", seconds=round(core.now - core.started_at, 3), nodes=len(core.nodes))


def _refusal(core: Core, peer: bytes, hello: AgentHello) -> Refused | None:
    info = core.info
    if not 0 <= hello.node_index < 100_000 or not hello.address:
        return Refused(
            code="malformed", text=f"node index {hello.node_index} at address {hello.address!r} is no place in a run"
        )
    if info.package_version and hello.package_version != info.package_version:
        return Refused(
            code="version",
            text=f"the agent on {hello.host} is miles-hpc {hello.package_version}, the hub {info.package_version}; "
            "start both from one installation",
        )
    if info.digest and hello.digest and hello.digest != info.digest:
        return Refused(
            code="digest",
            text=f"the agent on {hello.host} read another configuration (digest {hello.digest[:12]}) than the hub "
            f"({info.digest[:12]}); the file config.resolved.toml must not change during an attempt",
        )
    before = core.nodes.get(node_id(hello.node_index))
    if (
        before is not None
        and before.incarnation != hello.incarnation
        and before.condition == "alive"
        and not before.left
    ):
        return Refused(
            code="node_taken",
            text=f"{before.id} is taken by the agent with pid {before.pid} on {before.host}, heard "
            f"{core.now - before.last_heard:.1f} s ago; it is free again after {core.timing.suspect:g} s of silence",
        )
    return None


def welcome(core: Core, node: Node) -> Welcome:
    return Welcome(
        node=node.id,
        epoch=core.info.epoch,
        heartbeat=core.timing.heartbeat * core.heartbeat_scale(),
        run_id=core.info.run_id,
        attempt=core.info.attempt,
    )


def shutdown_order(core: Core) -> Shutdown:
    outcome = core.outcome or "failed"
    return Shutdown(reason=outcome, exit_code=EXIT_CODES[outcome])


def on_heard(core: Core, node: Node) -> None:
    """Any message of an agent shows that its loop moves."""
    node.last_heard = core.now
    if node.condition == "alive":
        return
    core.note("node_back", node=node.id, was=node.condition)
    node.condition, node.down = "alive", False
    # What was given to others while the node was silent must stop before the node gets work again.
    for worker, generation in node.strays.items():
        core.send_node(node.id, StopWorker(worker=worker, generation=generation, reason="superseded while silent"))


def watch_silence(core: Core) -> None:
    """SUSPECT gets no new work; DEAD loses its cells."""
    scale = core.heartbeat_scale()
    # A fleet that is well costs one comparison a node.
    noticed = core.now - core.timing.suspect * scale
    for node in [node for node in core.nodes.values() if node.last_heard < noticed]:
        if node.left:
            continue
        silent = core.now - node.last_heard
        if node.condition == "alive" and silent > core.timing.suspect * scale:
            node.condition = "suspect"
            core.note("node_suspect", "warning", node=node.id, silent_s=round(silent, 3))
        if node.condition == "suspect" and silent > core.timing.dead * scale and core.standing.acts:
            node.condition = "dead"
            core.note("node_dead", "error", node=node.id, silent_s=round(silent, 3))
            _lose_workers(core, node, f"{node.id} ({node.host}) is lost: silent for {silent:.1f} s")
        elif node.condition == "dead" and silent > core.timing.fence + FENCE_SLACK_S and core.standing.acts:
            # By now the agent itself has killed its stateful groups, or the node does not run.
            _count_as_gone(core, node, f"{node.id} is fenced")


def on_down_hosts(core: Core, hosts: Collection[str]) -> None:
    """The site is certain that these do not run: their stateful cells need not wait for the fence."""
    short = {short_name(host) for host in hosts}
    for node in list(core.nodes.values()):
        node.down = node.condition != "alive" and short_name(node.host) in short
        if node.condition == "dead" and not node.left and node.down:
            _count_as_gone(core, node, f"{node.id} ({node.host}) is down")
    unheard = {name: host for name, host in core.hosts_by_node().items() if name not in core.nodes}
    core.down_unheard = frozenset(name for name, host in unheard.items() if short_name(host) in short)


def short_name(host: str) -> str:
    """A host's name without its domain: Slurm and the host itself may differ in that."""
    return host.partition(".")[0]


def _count_as_gone(core: Core, node: Node, text: str) -> None:
    for cell, worker in core.workers_on(node.id):
        lifecycle.on_worker_gone(core, cell, worker, Ending(text, budgeted=False))


def on_goodbye(core: Core, node: Node, reason: str) -> None:
    """The agent has stopped its workers and leaves."""
    core.note("agent_left", node=node.id, reason=reason)
    node.left, node.left_early = True, core.outcome is None
    node.gpu_holders.clear()
    node.strays.clear()
    elastic.on_gone(core, node)
    text = f"the agent of {node.id} ({node.host}) left: {reason or 'no reason given'}"
    for cell, worker in core.workers_on(node.id):
        lifecycle.on_worker_gone(core, cell, worker, Ending(text, budgeted=False, outcome=core.when_told_to_leave()))
    if core.begun and not any(core.present_nodes()):
        core.decide("drained" if core.drain else "cancelled", f"every agent has left; the last: {text}")


def _lose_workers(core: Core, node: Node, text: str) -> None:
    elastic.on_gone(core, node)
    for cell, worker in core.workers_on(node.id):
        # It may still run there; should the node come back, it is stopped then.
        node.strays[worker.id], node.stray_pids[worker.id] = cell.generation, worker.pid
        ending = Ending(f"{text}, and with it {worker.id}", budgeted=False)
        if cell.spec.state == "stateless":
            lifecycle.on_worker_gone(core, cell, worker, ending)
        else:
            # A second copy of a stateful cell must not run beside the first: wait for the fence.
            lifecycle.end_cell(core, cell, ending)


# ------------------------------------------------------------------------------------------------- tables
def on_full_table(core: Core, node: Node, rows: list[WorkerState]) -> None:
    """Anti-entropy: adopt what was missed, stop what is not wanted, notice what is gone."""
    _reconcile(core, node, rows, after_hello=False, same_incarnation=True)


def _reconcile(core: Core, node: Node, rows: list[WorkerState], *, after_hello: bool, same_incarnation: bool) -> None:
    listed: dict[str, Generation] = {}
    for row in rows:
        listed[row.worker] = row.generation
        found = core.find(row.worker, row.generation, node.id)
        if found is None:
            if node.strays.get(row.worker) != row.generation:
                core.note("stray_worker", "warning", node=node.id, worker=row.worker, generation=str(row.generation))
            node.add_stray(row)
            core.send_node(node.id, StopWorker(worker=row.worker, generation=row.generation, reason="not wanted here"))
        else:
            node.strays.pop(row.worker, None)
            _adopt(core, *found, row, resend=after_hello)
    for stray, generation in list(node.strays.items()):
        if listed.get(stray) != generation:
            del node.strays[stray]
            node.release(stray, generation)
    for cell, worker in core.workers_on(node.id):
        if listed.get(worker.id) == cell.generation:
            continue
        in_flight = core.now - worker.ordered_at <= core.timing.suspect
        if not after_hello and in_flight:
            continue
        if same_incarnation and not worker.pid and cell.phase in (Phase.RESERVING, Phase.STARTING):
            _send_again(core, cell, worker)
        elif not (same_incarnation and cell.phase is Phase.RESERVED):
            node.release(worker.id, cell.generation)
            why = "is gone: its agent does not list it" if same_incarnation else "is gone: its agent was started anew"
            lifecycle.on_worker_gone(core, cell, worker, Ending(f"{worker.id} {why}"))


def _adopt(core: Core, cell: Cell, worker: Worker, row: WorkerState, *, resend: bool) -> None:
    """A row of the current generation: catch up with reports that were lost."""
    if row.pid:
        worker.pid = row.pid
    overdue = resend or core.now - worker.ordered_at > core.timing.suspect
    if cell.phase is Phase.STOPPING:
        if overdue and (resend or row.state != "stopping"):
            lifecycle.send_stop(core, cell, worker, "sent again")
    elif overdue and _unanswered(cell, worker, row):
        _send_again(core, cell, worker)
    elif cell.phase is Phase.STARTING and row.state == "ready" and not worker.ready:
        lifecycle.on_ready(core, worker.id, cell.generation, worker.node)


def _unanswered(cell: Cell, worker: Worker, row: WorkerState) -> bool:
    if cell.phase is Phase.RESERVING:
        return worker.ports is None
    return cell.phase is Phase.STARTING and row.state == "reserved"


def _send_again(core: Core, cell: Cell, worker: Worker) -> None:
    """Orders are idempotent by (worker, generation), so one that may be lost is repeated."""
    if worker.order is not None:
        worker.ordered_at = core.now
        core.send_node(worker.node, worker.order)
    else:
        lifecycle.send_reserve(core, cell, worker)
