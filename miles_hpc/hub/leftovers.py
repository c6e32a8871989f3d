"""Workers that do not end although they were told to, and killed: one that hangs in the kernel cannot be killed at all.

Their agent lists them for as long as anything of them is left, so nobody else ends that wait.

- A cell without state goes on without them, on another node: on theirs they have its name and ports. Their GPUs stay
  taken until their end is confirmed.
- A second copy of a stateful cell must not run beside the first, and here nobody can say that the first does nothing
  more. So the run waits `timing.replace_timeout`, as it does for a place, and then drains: the next attempt goes on
  from the last commit, and its first entry in the commit log shuts this attempt's programs out.
"""

from __future__ import annotations

from miles_hpc.hub import drain, lifecycle
from miles_hpc.hub.core import FENCE_SLACK_S, Cell, Core, Leftover, Node, Phase
from miles_hpc.hub.healing import Ending
from miles_hpc.wire.ids import Generation


def patience(core: Core, cell: Cell | None) -> float:
    """How long an end may take: the stop's own grace, and then what is given to a node that is not heard."""
    grace = core.timing.stop_grace if cell is None else cell.spec.stop_grace
    return grace + core.timing.fence + FENCE_SLACK_S


def watch(core: Core) -> None:
    """Say which workers do not end, and do what can be done without them."""
    if core.outcome is not None or core.recovering is not None or not core.standing.acts:
        core.leftovers.clear()  # a worker may have ended with nobody to tell: the wait begins anew
        return
    _look(core)
    for (node, worker, generation), leftover in core.leftovers.items():
        cell = core.cells.get(worker.rpartition("-")[0])
        waited = core.now - leftover.since
        if waited > patience(core, cell):
            _give_up(core, core.nodes[node], cell, worker, generation, leftover, waited)


def _look(core: Core) -> None:
    """A node that is not heard is judged by its silence; and what its agent does not list any more has ended."""
    found: dict[tuple[str, str, Generation], Leftover] = {}
    for node in core.nodes.values():
        if node.strays and node.condition == "alive" and not node.left:
            for stray, generation in node.strays.items():
                found[node.id, stray, generation] = Leftover(node.stray_pids.get(stray, 0), core.now)
    for name in core.stopping:
        cell = core.cells[name]
        for worker in cell.workers:
            node = core.nodes[worker.node]
            if not worker.gone and node.condition == "alive":
                found[node.id, worker.id, cell.generation] = Leftover(worker.pid, core.now)
    core.leftovers = {key: core.leftovers.get(key, leftover) for key, leftover in found.items()}


def _give_up(
    core: Core, node: Node, cell: Cell | None, worker: str, generation: Generation, leftover: Leftover, waited: float
) -> None:
    if not leftover.told:
        leftover.told = True
        core.note(
            "worker_does_not_end",
            "error",
            worker=worker,
            generation=str(generation),
            pid=leftover.pid,
            node=node.id,
            host=node.host,
            seconds=round(waited, 3),
        )
    if cell is None:
        return
    if cell.spec.state == "stateless":
        found = core.find(worker, generation, node.id)
        if found is not None and cell.phase is Phase.STOPPING:
            node.strays[worker], node.stray_pids[worker] = generation, leftover.pid
            lifecycle.on_worker_gone(core, cell, found[1], Ending(""))
        return
    hindered = cell.wanted and cell.phase in (Phase.STOPPING, Phase.WAITING)
    if hindered and waited > core.timing.replace_timeout and not lifecycle.spared(core, cell):
        where = f"{worker} (pid {leftover.pid}) on {node.id} ({node.host})"
        text = f"{where} has not ended for {waited:.0f} s, although it was killed, and a second {cell.id} may not run"
        drain.begin(core, f"{text} beside it; the agent's log names its processes", 0.0, "leftovers")
