"""Where in the fleet there is room for a cell: the hub's nodes as the placement sees them."""

from __future__ import annotations

from miles_hpc.hub.core import Cell, Core, Node, Phase
from miles_hpc.hub.healing import vital
from miles_hpc.hub.placement import Fleet, NodeSlots, Place, PlacementRefused


class Room:
    """Finds places while the hub's state changes by nothing but the cells that are placed: for one event.

    The fleet is looked at when the first cell needs it, and only once.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._fleets: list[Fleet] = []
        self._with_strays: list[Node] = []

    def find(self, cell: Cell) -> list[Place]:
        """Places for each worker of a cell.

        Raises:
            PlacementRefused: when it fits nowhere.
        """
        places = _kept_places(self._core, cell) or self._find(cell)
        for fleet in self._fleets:
            fleet.take(cell.pool, cell.spec.scheduling, places)
        return places

    def _find(self, cell: Cell) -> list[Place]:
        core, need = self._core, cell.spec.scheduling
        if not self._fleets:
            self._look()
        on_gpus = need.num_gpus_per_worker > 0
        refused: PlacementRefused | None = None
        for fleet in self._fleets:
            try:
                return fleet.place(
                    cell.id,
                    cell.pool,
                    need,
                    hub_node=core.info.hub_node,
                    avoid_hub_node=need.avoid_hub_node or (cell.spec.state == "stateful" and not on_gpus),
                    barred=[node.id for node in self._with_strays if _stray_of(node, cell)],
                    kept_back=_kept_for_vital_cells(core, cell) if on_gpus else {},
                    previous=[(worker.node, worker.gpu_slots) for worker in cell.previous],
                )
            except PlacementRefused as failure:
                refused = failure
        assert refused is not None
        left_out = [node.id for node in self._with_strays if _stray_of(node, cell)]
        if left_out:
            raise PlacementRefused(
                f"{refused}; left out: {', '.join(left_out)}, where an older {cell.id} has not ended"
            )
        raise refused

    def _look(self) -> None:
        core = self._core
        cpus_used: dict[str, float] = {}
        of_pool: dict[str, dict[str, int]] = {}
        for cell in core.cells.values():
            cpus, workers = cell.spec.scheduling.num_cpus_per_worker, of_pool.setdefault(cell.pool, {})
            for worker in cell.workers if cell.phase is not Phase.WAITING else ():
                if not worker.gone:
                    cpus_used[worker.node] = cpus_used.get(worker.node, 0.0) + cpus
                    workers[worker.node] = workers.get(worker.node, 0) + 1
        alive = _usable_nodes(core)
        healthy = [node for node in alive if not node.quarantined]
        # A node that eats cells is better than none.
        for usable in [healthy, alive] if healthy and len(healthy) < len(alive) else [alive]:
            slots = [
                NodeSlots(
                    id=node.id,
                    cpus=node.cpus,
                    gpus=len(node.gpus),
                    free_gpus=frozenset(range(len(node.gpus))) - node.gpu_holders.keys(),
                    cpus_used=cpus_used.get(node.id, 0.0),
                )
                for node in usable
            ]
            self._fleets.append(Fleet(slots, of_pool))
        self._with_strays = [node for node in alive if node.strays]


def _usable_nodes(core: Core) -> list[Node]:
    alive = sorted((n for n in core.nodes.values() if n.condition == "alive" and not n.left), key=lambda n: n.index)
    # Spare nodes get work only when there are not enough others.
    return alive[: max(1, core.info.expected_nodes - core.info.spare_nodes)] if core.info.spare_nodes else alive


def _kept_places(core: Core, cell: Cell) -> list[Place] | None:
    """Where the last generation was, if all of that is free: found without a look at the rest of the fleet."""
    if not cell.previous or core.info.spare_nodes:
        return None
    for worker in cell.previous:
        node = core.nodes.get(worker.node)
        if node is None or node.condition != "alive" or node.left or node.quarantined or _stray_of(node, cell):
            return None
        if any(slot in node.gpu_holders or slot >= len(node.gpus) for slot in worker.gpu_slots):
            return None
    return [(worker.node, worker.gpu_slots) for worker in cell.previous]


def _kept_for_vital_cells(core: Core, cell: Cell) -> dict[str, set[int]]:
    """GPU slots that other cells, without which the run cannot go on, had and will be given again: they may wait for a
    fence meanwhile, and whoever is placed there would hold up the run.
    """
    found: dict[str, set[int]] = {}
    for name in core.waiting:
        other = core.cells[name]
        if other is not cell and other.wanted and vital(other):
            for worker in other.previous:
                found.setdefault(worker.node, set()).update(worker.gpu_slots)
    return found


def _stray_of(node: Node, cell: Cell) -> bool:
    """An old process of the cell may still hold its name and ports there."""
    return any(stray.rpartition("-")[0] == cell.id for stray in node.strays)
