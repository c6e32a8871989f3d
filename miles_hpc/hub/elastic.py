"""Nodes of other jobs that join a living run: each brings engines, which go with it. They count for no majority."""

from __future__ import annotations

from collections.abc import Sequence

from miles_hpc.hub import lifecycle, recovery
from miles_hpc.hub.core import Cell, Core, Node, Phase, Worker
from miles_hpc.hub.healing import Ending
from miles_hpc.specs.base import CommandWorkerSpec
from miles_hpc.wire.ids import cell_id, parse_worker_id, worker_id
from miles_hpc.wire.messages import WorkerState


def is_guest(core: Core, node: Node) -> bool:
    """Whether a node came after the first job's."""
    return node.index >= core.info.expected_nodes


def on_hello(core: Core, node: Node, table: Sequence[WorkerState]) -> None:
    """Want as many more engines as the node has room for, at least one on a node without GPUs; once for each node."""
    if not is_guest(core, node) or core.outcome is not None or core.drain is not None:
        return
    for row in table:
        _know_again(core, node, row)
    if any(cell.guest_of == node.id and cell.wanted for cell in core.cells.values()):
        return
    taken = 0
    for spec in core.specs.values():
        if spec.category != "engine" or spec.scheduling.num_workers_per_cell != 1:
            continue
        need = spec.scheduling.num_gpus_per_worker
        room = (len(node.gpus) - taken) // need if need else int(not node.gpus)
        for _ in range(room):
            _add(core, spec, node, tuple(range(taken, taken + need)))
            taken += need


def on_gone(core: Core, node: Node) -> None:
    """The node left or is lost: nobody wants its engines any more. Those that run elsewhere by now are stopped."""
    for cell in core.cells.values():
        if cell.guest_of != node.id or not cell.wanted:
            continue
        cell.wanted = False
        core.note("cell_dropped", cell=cell.id, node=node.id)
        if cell.phase is Phase.WAITING:
            core.change_phase(cell, Phase.STOPPED)
        elif cell.phase is not Phase.STOPPING:
            lifecycle.end_cell(core, cell, Ending(f"{node.id} left the run", budgeted=False, final=True))


def _know_again(core: Core, node: Node, row: WorkerState) -> None:
    """A hub that took over knows no guests: an engine that runs on one keeps its name, and goes on."""
    if row.state not in ("starting", "ready") or not row.pid or row.worker.rpartition("-")[0] in core.cells:
        return
    try:
        pool, index, _ = parse_worker_id(row.worker)
    except ValueError:
        return
    spec = core.specs.get(pool)
    if spec is None or spec.category != "engine" or spec.scheduling.num_workers_per_cell != 1:
        return
    slots = tuple(slot for slot, gpu in enumerate(node.gpus) if gpu.uuid in row.gpu_uuids)
    cell = _add(core, spec, node, slots, index)
    if core.recovering is None:
        recovery.adopt(core, cell, row.generation, {0: (node, row)})


def _add(core: Core, spec: CommandWorkerSpec, node: Node, slots: tuple[int, ...], index: int | None = None) -> Cell:
    pool = core.pools[spec.name]
    if index is None:
        index = 1 + max((cell.index for cell in pool), default=-1)
    name = cell_id(spec.name, index)
    cell = Cell(name, spec, index, guest_of=node.id)
    # As if its last generation had been there: placement keeps a place that is free.
    cell.previous = [Worker(worker_id(name, 0), 0, node.id, slots)]
    pool.append(cell)
    core.cells[name] = cell
    core.waiting[name] = None
    core.note("cell_added", cell=name, node=node.id)
    return cell
