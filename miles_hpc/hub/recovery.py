"""A hub that takes over: what the agents run is adopted with its generations before anything is placed or published."""

from __future__ import annotations

import msgspec

from miles_hpc.hub import lifecycle
from miles_hpc.hub.core import FENCE_SLACK_S, Cell, Core, Node, Phase, Worker
from miles_hpc.hub.healing import Ending, group_of
from miles_hpc.wire.ids import Generation, node_id, parse_worker_id
from miles_hpc.wire.messages import ClientHello, FullTable, StopWorker, WorkerExited, WorkerReady, WorkerState

_Found = dict[int, tuple[Node, WorkerState]]
"""Worker index -> where it runs."""


class Recovery(msgspec.Struct):
    """From the claim of an epoch until the tables of all nodes are in, or `timing.dead` is over and enough of them."""

    claimed_at: float
    powerless_at: float = 0.0
    """When it last heard too little of the run to act."""
    concluded: bool = False
    tables: dict[str, dict[str, WorkerState]] = msgspec.field(default_factory=dict)
    """Node -> worker -> its row."""
    newest: dict[str, Generation] = msgspec.field(default_factory=dict)
    """Cell -> its newest generation that any row or the journal tells of, whether it runs or not. An older one was
    superseded: who has read the address book has given it up."""
    clients: dict[bytes, ClientHello] = msgspec.field(default_factory=dict)
    """Programs that wait for the word whether they are still wanted."""
    held: set[str] = msgspec.field(default_factory=set)
    """Stateful cells that may still run on a node that was not heard."""
    fenced_at: float = 0.0
    """From then on they run nowhere any more."""

    def know(self, cell: str, generation: Generation) -> None:
        """There is, or was, this generation of a cell."""
        self.newest[cell] = max(generation, self.newest.get(cell, generation))


def on_table(recovery: Recovery, node: Node, rows: list[WorkerState]) -> None:
    """What a node runs, all of it."""
    recovery.tables[node.id] = {row.worker: row for row in rows}
    for row in rows:
        recovery.know(row.worker.rpartition("-")[0], row.generation)


def on_report(recovery: Recovery, node: Node, message: object) -> None:
    """What happens on a node while the others are waited for."""
    rows = recovery.tables.setdefault(node.id, {})
    match message:
        case FullTable():
            on_table(recovery, node, message.workers)
        case WorkerExited():
            row = rows.get(message.worker)
            if row is not None and row.generation == message.generation:
                if message.gone:
                    del rows[message.worker]
                else:
                    rows[message.worker] = msgspec.structs.replace(row, state="stopping")
        case WorkerReady():
            row = rows.get(message.worker)
            if row is not None and row.generation == message.generation:
                rows[message.worker] = WorkerState(
                    worker=row.worker,
                    generation=row.generation,
                    state="ready",
                    pid=row.pid,
                    ports=row.ports,
                    gpu_uuids=row.gpu_uuids,
                )


def missing_nodes(core: Core) -> list[str]:
    """Nodes of the run that have not said hello to this hub, or are lost."""
    present = {node.id for node in core.present_nodes()}
    return [name for name in map(node_id, range(core.info.expected_nodes)) if name not in present]


def unheard_nodes(core: Core) -> bool:
    """Whether nodes of the run have never said hello to this hub."""
    return any(node_id(index) not in core.nodes for index in range(core.info.expected_nodes))


def watch(core: Core, recovery: Recovery) -> None:
    """Conclude when every table is in, or nothing more is to be expected; free what was held when its node is back.

    A hub that hears too little of the run to act concludes nothing: it would end what runs on the nodes that it hears.
    When enough of them are back, the others have as long to come as after a claim.
    """
    missing = missing_nodes(core)
    if not core.standing.acts:
        recovery.powerless_at = core.now
    waited = core.now - max(recovery.claimed_at, recovery.powerless_at) > core.timing.dead
    if not recovery.concluded and (not missing or waited):
        _conclude(core, recovery, missing)
    elif recovery.concluded and recovery.held and not missing:
        for name in recovery.held:
            core.cells[name].retry_at = core.now
        recovery.held.clear()


def _conclude(core: Core, recovery: Recovery, missing: list[str]) -> None:
    recovery.concluded = True
    core.begun = True
    complete = _complete_cells(core, recovery)
    for name, (generation, found) in complete.items():
        adopt(core, core.cells[name], generation, found)
    _stop_the_rest(core, recovery)
    core.note(
        "recovered",
        "warning" if missing else "info",
        adopted=sorted(complete),
        missing_nodes=missing,
        seconds=round(core.now - recovery.claimed_at, 3),
    )
    for cell in core.cells.values():
        torn = any(member.phase is Phase.WAITING and member.wanted for member in group_of(core, cell))
        if torn and cell.phase is not Phase.WAITING:
            text = "another part of its group did not outlive the last hub"
            lifecycle.end_cell(core, cell, Ending(text, budgeted=False, follows=True))
    if missing:
        recovery.fenced_at = recovery.claimed_at + core.timing.fence + FENCE_SLACK_S
        for cell in core.cells.values():
            lost = [member for member in group_of(core, cell) if member.phase is Phase.WAITING]
            if cell.spec.state == "stateful" and lost:
                cell.retry_at = max(cell.retry_at, recovery.fenced_at)
                recovery.held.add(cell.id)


def _complete_cells(core: Core, recovery: Recovery) -> dict[str, tuple[Generation, _Found]]:
    """Cells of which every worker of the newest generation runs."""
    seen: dict[str, dict[Generation, _Found]] = {}
    for node_name, rows in recovery.tables.items():
        node = core.nodes[node_name]
        if node.left or node.condition == "dead":
            continue
        for row in rows.values():
            place = _place_of(core, row)
            if place is not None and row.state in ("starting", "ready") and row.pid:
                cell, index = place
                seen.setdefault(cell.id, {}).setdefault(row.generation, {})[index] = (node, row)
    found: dict[str, tuple[Generation, _Found]] = {}
    for name, by_generation in seen.items():
        cell, newest = core.cells[name], recovery.newest[name]
        running = by_generation.get(newest, {})
        if len(running) == cell.spec.scheduling.num_workers_per_cell and cell.wanted:
            found[name] = (newest, running)
    return found


def _place_of(core: Core, row: WorkerState) -> tuple[Cell, int] | None:
    try:
        _, _, index = parse_worker_id(row.worker)
    except ValueError:
        return None
    cell = core.cells.get(row.worker.rpartition("-")[0])
    return (cell, index) if cell is not None and index < cell.spec.scheduling.num_workers_per_cell else None


def adopt(core: Core, cell: Cell, generation: Generation, found: _Found) -> None:
    """A cell whose workers were found running is taken as it is."""
    cell.generation = generation
    cell.starts = max(cell.starts, 1)
    cell.workers = []
    for index, (node, row) in sorted(found.items()):
        core.remember_place(node.id, cell)
        slots = tuple(slot for slot, gpu in enumerate(node.gpus) if gpu.uuid in row.gpu_uuids)
        cell.workers.append(
            Worker(
                id=row.worker,
                index=index,
                node=node.id,
                gpu_slots=slots,
                ports=dict(row.ports),
                pid=row.pid,
                ready=row.state == "ready",
                ordered_at=core.now,
            )
        )
        node.gpu_holders.update(dict.fromkeys(slots, (row.worker, generation)))
    core.change_phase(cell, Phase.READY if all(worker.ready for worker in cell.workers) else Phase.STARTING)


def _stop_the_rest(core: Core, recovery: Recovery) -> None:
    """What is no part of an adopted cell is stopped; until its end is confirmed its cell is not placed there, and a
    stateful one nowhere."""
    for node_name, rows in recovery.tables.items():
        node = core.nodes[node_name]
        for row in rows.values():
            if core.find(row.worker, row.generation, node.id) is None:
                node.add_stray(row)
                core.note("stray_worker", "warning", node=node.id, worker=row.worker, generation=str(row.generation))
                core.send_node(
                    node.id,
                    StopWorker(worker=row.worker, generation=row.generation, reason="its cell is not whole any more"),
                )
    recovery.tables.clear()
