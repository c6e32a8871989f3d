"""Cells: placed, given ports, started; ended as a whole when one worker dies; started again within the budget."""

from __future__ import annotations

from miles_hpc.hub import drain
from miles_hpc.hub.causes import last_words
from miles_hpc.hub.core import Cell, Core, Phase, Worker
from miles_hpc.hub.healing import Ending, judge, may_start, vital
from miles_hpc.hub.placement import PlacementRefused
from miles_hpc.hub.render import ports_of_worker, start_order
from miles_hpc.hub.room import Room
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import PortsReserved, ReservePorts, StopWorker, Superseded, WorkerExited

PORT_RELAUNCHES = 3
"""Starts on other ports, beside the heal budget, of a cell that lost a race for one of its ports."""
PLACED_LATER_S = 10.0
"""A cell that fits nowhere for longer than this is looked at only once a second."""


# ------------------------------------------------------------------------------------------------ starting
def advance(core: Core) -> None:
    """Take each cell over the barriers that it can pass now."""
    if core.outcome is not None or core.drain is not None:
        return
    if core.begun:
        room = Room(core)
        for cell_id in list(core.waiting):
            cell = core.cells[cell_id]
            if core.outcome is None and cell.retry_at <= core.now and may_start(core, cell):
                _reserve(core, cell, room)
    for cell_id in list(core.reserved):
        cell = core.cells[cell_id]
        if core.outcome is None and _read_pools_known(core, cell):
            _start(core, cell)


def _reserve(core: Core, cell: Cell, room: Room) -> None:
    """Barrier 1: a place and a request for ports for each worker, or nothing at all."""
    try:
        places = room.find(cell)
    except PlacementRefused as refusal:
        _on_refused(core, cell, str(refusal))
        return
    cell.generation = Generation(core.info.epoch, cell.generation.n + 1)
    cell.unplaced_since = None
    cell.workers = core.new_workers(cell, places)
    core.change_phase(cell, Phase.RESERVING)
    core.note("cell_placed", cell=cell.id, generation=str(cell.generation), nodes=sorted({node for node, _ in places}))
    for worker in cell.workers:
        node = core.nodes[worker.node]
        for slot in worker.gpu_slots:
            node.gpu_holders[slot] = (worker.id, cell.generation)
        before = cell.previous[worker.index] if cell.previous else None
        if before is not None and before.node == worker.node:
            worker.keep = before.ports or before.keep
        send_reserve(core, cell, worker)


def send_reserve(core: Core, cell: Cell, worker: Worker) -> None:
    worker.ordered_at = core.now
    core.send_node(
        worker.node,
        ReservePorts(
            worker=worker.id,
            generation=cell.generation,
            ports=ports_of_worker(cell, worker.index),
            cell_index=cell.index,
            keep=worker.keep,
        ),
    )


def _on_refused(core: Core, cell: Cell, text: str) -> None:
    """A cell that fits nowhere. What never fitted ends the run with the numbers; what has lost its place waits for
    another, and when none comes the run drains, to go on in another allocation from its last commit.
    """
    if cell.unplaced_since is None:
        cell.unplaced_since = core.now
        core.note("cell_unplaced", "warning", cell=cell.id, reason=text)
    if cell.guest_of:
        return  # it is wanted only while its own node is there, which may be leaving
    waited = core.now - cell.unplaced_since
    if waited > PLACED_LATER_S:
        cell.retry_at = core.now + 1.0  # it may wait for hours, and a look at a large fleet costs
    if cell.starts == 0 and core.info.epoch == 1:
        whole = sum(1 for node in core.nodes.values() if node.condition == "alive" and not node.left)
        moving = any(other.phase is Phase.STOPPING for other in core.cells.values())
        moving = moving or any(node.strays for node in core.nodes.values())
        if whole >= core.info.expected_nodes and not moving:
            core.decide("failed", text)
        elif waited > core.timing.join:
            core.decide("failed", f"{text}; nothing became free within {core.timing.join:g} s (timing.join)")
    elif waited > core.timing.replace_timeout and not spared(core, cell):
        limit = core.timing.replace_timeout
        drain.begin(core, f"{text}; nothing became free within {limit:g} s (timing.replace_timeout)", 0.0, "placement")


def spared(core: Core, cell: Cell) -> bool:
    """Whether the run gets on without this cell: others of its pool do its work, only less of it."""
    return not vital(cell) and any(other.phase is Phase.READY for other in core.pools[cell.pool])


def on_ports(core: Core, report: PortsReserved, node_id: str) -> None:
    """Barrier 2: an answer to ReservePorts; a refusal takes the whole cell back."""
    found = core.find(report.worker, report.generation, node_id)
    if found is None or found[0].phase is not Phase.RESERVING:
        return
    cell, worker = found
    if report.error:
        worker.gone = True  # it holds nothing, so there is nothing to stop
        core.nodes[node_id].release(worker.id, cell.generation)
        end_cell(core, cell, Ending(f"{report.worker} got no ports on {node_id}: {report.error}"))
        return
    wanted = [port.name for port in ports_of_worker(cell, worker.index)]
    missing = [name for name in wanted if name not in report.ports]
    if missing:
        end_cell(
            core, cell, Ending(f"{node_id} gave {worker.id} the ports {sorted(report.ports)}; {missing} are missing")
        )
        return
    if not all(0 < port < 65536 for port in report.ports.values()):
        end_cell(core, cell, Ending(f"{node_id} gave {worker.id} impossible ports: {report.ports}"))
        return
    worker.ports = dict(report.ports)
    if all(other.ports is not None for other in cell.workers):
        core.change_phase(cell, Phase.RESERVED)


def _read_pools_known(core: Core, cell: Cell) -> bool:
    return all(other.published for pool in cell.spec.reads for other in core.pools[pool] if other.wanted)


def _start(core: Core, cell: Cell) -> None:
    """Barrier 3: every command is rendered before the first is sent."""
    try:
        orders = [start_order(core, cell, worker) for worker in cell.workers]
    except Exception as error:  # a spec is a user's code: whatever it raises ends the run with its name
        core.decide("failed", f"pool {cell.pool}: its command cannot be rendered: {type(error).__name__}: {error}")
        return
    healing = cell.starts > 0 and not cell.ordered
    cell.starts, cell.ordered = max(cell.starts + healing, 1), False
    core.change_phase(cell, Phase.STARTING)
    if healing:
        core.note("cell_healing", cell=cell.id, generation=str(cell.generation), restarts=cell.restarts)
    for worker, order in zip(cell.workers, orders, strict=True):
        worker.order = order
        worker.ordered_at = core.now
        core.send_node(worker.node, order)


def on_started(core: Core, worker: str, generation: Generation, pid: int, node_id: str) -> None:
    found = core.find(worker, generation, node_id)
    if found is not None:
        found[1].pid = pid


def on_ready(core: Core, worker: str, generation: Generation, node_id: str) -> None:
    found = core.find(worker, generation, node_id)
    if found is None or found[0].phase is not Phase.STARTING:
        return
    cell = found[0]
    found[1].ready = True
    if all(other.ready for other in cell.workers):
        core.change_phase(cell, Phase.READY)
        cell.port_losses = 0
        core.note("cell_ready", cell=cell.id, generation=str(cell.generation))
        if core.ready_at is None and all(c.phase is Phase.READY for c in core.cells.values() if c.wanted):
            core.ready_at = core.now
            core.note("all_ready", seconds=round(core.now - core.started_at, 3))


# -------------------------------------------------------------------------------------------------- ending
def on_exited(core: Core, report: WorkerExited, node_id: str) -> None:
    """A worker has ended, or is gone: its cell ends, or is one step nearer to its end."""
    node = core.nodes[node_id]
    found = core.find(report.worker, report.generation, node_id)
    known = found is not None and found[1].ended
    if known and not report.gone:
        return  # told once more, to a connection that may have lost it
    quiet = known or report.cause == "stopped" or core.outcome is not None
    core.note(
        "worker_gone" if known else "worker_exited",
        "info" if quiet else "warning",
        worker=report.worker,
        generation=str(report.generation),
        node=node_id,
        how=how_it_ended(report),
    )
    if report.gone:
        node.release(report.worker, report.generation)
        if node.strays.get(report.worker) == report.generation:
            del node.strays[report.worker]
    if found is None:
        return
    cell, worker = found
    if known:
        if report.gone:
            on_worker_gone(core, cell, worker, Ending(""))  # why its cell ends was read from the first report
        return
    worker.ended = True
    text = f"{worker.id} {how_it_ended(report)}"
    if report.cause == "stopped_by_slurm":
        ending = Ending(text, budgeted=False, final=True)
    elif report.cause == "port_taken" and cell.port_losses < PORT_RELAUNCHES:
        cell.port_losses += 1
        worker.ports, worker.keep = None, {}
        ending = Ending(text, budgeted=False, relaunch=True)
    elif report.cause == "stopped" and core.outcome is None:
        # Nobody here asked for it (else the cell would be STOPPING and this is not read): the agent was told to leave.
        ending = Ending(
            f"the agent of {node_id} was told to leave: {text}", budgeted=False, outcome=core.when_told_to_leave()
        )
    else:
        ending = Ending(text)
    if report.gone:
        on_worker_gone(core, cell, worker, ending)
    else:
        end_cell(core, cell, ending)


def on_worker_gone(core: Core, cell: Cell, worker: Worker, ending: Ending) -> None:
    worker.gone = True
    if cell.phase is not Phase.STOPPING:
        end_cell(core, cell, ending)
    elif all(other.gone for other in cell.workers):
        _on_cell_gone(core, cell)


def how_it_ended(report: WorkerExited) -> str:
    """`ended with exit code 1, probe_failed: …; its last line: …; likely cause: …; log /run/logs/…`"""
    if report.signal is not None:
        end = f"was killed by signal {report.signal}"
    elif report.exit_code is not None:
        end = f"ended with exit code {report.exit_code}"
    else:
        end = "is gone" if report.gone else "ends"
    if report.oom != "no":
        end += f", out of memory ({report.oom})"
    if report.cause not in ("exited", "stopped"):
        end += f", {report.cause}"
    if report.text:
        end += f": {report.text}"
    lost = report.cause == "process_lost"
    if report.cause != "stopped" and (report.exit_code or report.signal is not None or lost):
        end += last_words(report.log_tail, killed=report.signal is not None or lost)
    return f"{end}; log {report.log_path}" if report.log_path else end


def end_cell(core: Core, cell: Cell, ending: Ending) -> None:
    """Stop what is left of a cell; it is started again when all of it is confirmed gone."""
    if cell.phase in (Phase.STOPPING, Phase.STOPPED, Phase.WAITING):
        return
    core.change_phase(cell, Phase.STOPPING)
    core.note(
        "cell_ends",
        "warning" if core.outcome is None else "info",
        cell=cell.id,
        generation=str(cell.generation),
        reason=ending.text,
    )
    for peer in [peer for peer, client in core.clients.items() if client.cell == cell.id]:
        del core.clients[peer]
        core.send(peer, Superseded(reason=f"cell {cell.id} g{cell.generation} ends: {ending.text}"))
    for worker in cell.workers:
        if not (worker.gone or worker.ended):
            send_stop(core, cell, worker, ending.text)
    cell.wanted = cell.wanted and not ending.final
    if core.outcome is None and cell.wanted and not ending.follows:
        for other in judge(core, cell, ending):
            text = f"{cell.id} of its group ended: {ending.text}"
            end_cell(core, other, Ending(text, budgeted=False, follows=True))
    if all(worker.gone for worker in cell.workers):
        _on_cell_gone(core, cell)


def send_stop(core: Core, cell: Cell, worker: Worker, reason: str) -> None:
    worker.ordered_at = core.now
    core.send_node(worker.node, StopWorker(worker=worker.id, generation=cell.generation, reason=reason))


def _on_cell_gone(core: Core, cell: Cell) -> None:
    cell.previous = cell.workers
    cell.workers = []
    core.note("cell_gone", cell=cell.id, generation=str(cell.generation))
    core.change_phase(cell, Phase.WAITING if cell.wanted else Phase.STOPPED)


def on_replace(core: Core, cell_id: str, generation: Generation, reason: str, by: str) -> None:
    """The controller has no use for this generation of a cell; another generation is left alone."""
    cell = core.cells.get(cell_id)
    if cell is None or cell.generation != generation or cell.phase in (Phase.STOPPING, Phase.WAITING, Phase.STOPPED):
        core.note("replace_ignored", cell=cell_id, generation=str(generation), by=by)
        return
    end_cell(core, cell, Ending(f"{by} asked for a replacement: {reason}"))
