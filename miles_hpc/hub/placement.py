"""Where the workers of a cell go. Pure: free slots in, places out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from miles_hpc.specs.base import SchedulingSpec

Place = tuple[str, tuple[int, ...]]
"""Node id and the indices of the GPU slots on it."""


class NodeSlots(msgspec.Struct, frozen=True):
    """What a node that may take work offers, in the fleet's node order."""

    id: str
    cpus: float
    gpus: int
    """GPUs in all."""
    free_gpus: frozenset[int]
    cpus_used: float = 0.0
    """CPUs that the cells placed there ask for; more than `cpus` is possible, CPUs are shared."""
    pool_workers: int = 0
    """Workers of the same pool that are there already."""


class PlacementRefused(Exception):
    """A cell fits nowhere now; the text has the numbers."""


def place(
    cell: str,
    need: SchedulingSpec,
    nodes: Sequence[NodeSlots],
    *,
    hub_node: str = "",
    avoid_hub_node: bool = False,
    previous: Sequence[Place] = (),
) -> list[Place]:
    """Places for each worker of a cell, in worker order.

    A GPU cell gets contiguous slots in (node, GPU) order: on one node, or whole nodes that follow each other. A CPU
    cell goes to the least occupied node; its workers stay together when they fit the node's CPUs, or `placement` is
    "pack".

    Args:
        previous: where the last generation was; kept when it is still free.

    Raises:
        PlacementRefused: when no node or slot is free; nothing is taken partially.
    """
    if not nodes:
        raise PlacementRefused(f"cell {cell}: no node is alive to place its {need.num_workers_per_cell} workers on")
    if previous and _still_free(previous, nodes):
        return list(previous)
    if need.num_gpus_per_worker:
        return _place_gpus(cell, need, nodes)
    return _place_cpus(need, nodes, hub_node if avoid_hub_node else "")


def _still_free(previous: Sequence[Place], nodes: Sequence[NodeSlots]) -> bool:
    free = {node.id: node.free_gpus for node in nodes}
    return all(node in free and free[node].issuperset(slots) for node, slots in previous)


def _place_cpus(need: SchedulingSpec, nodes: Sequence[NodeSlots], avoided: str) -> list[Place]:
    candidates = [node for node in nodes if node.id != avoided] or list(nodes)
    workers = need.num_workers_per_cell
    # Round-robin: fewest workers of this pool first, then least asked of its CPUs, then node order.
    order = sorted(
        range(len(candidates)),
        key=lambda i: (candidates[i].pool_workers, candidates[i].cpus_used / max(candidates[i].cpus, 1.0), i),
    )
    if need.placement == "pack":
        order = sorted(order)
    first = candidates[order[0]]
    if workers == 1 or need.placement == "pack":
        return [(first.id, ())] * workers
    for i in order:
        if workers * need.num_cpus_per_worker <= candidates[i].cpus:
            return [(candidates[i].id, ())] * workers
    spread = sorted(order[:workers])
    return [(candidates[spread[w * len(spread) // workers]].id, ()) for w in range(workers)]


def _place_gpus(cell: str, need: SchedulingSpec, nodes: Sequence[NodeSlots]) -> list[Place]:
    per_worker, workers = need.num_gpus_per_worker, need.num_workers_per_cell
    total = per_worker * workers
    for node in nodes:
        for start in range(node.gpus - total + 1):
            run = range(start, start + total)
            if node.free_gpus.issuperset(run):
                return _cut([(node.id, slot) for slot in run], per_worker)
    largest = max(node.gpus for node in nodes)
    if total > largest > 0:
        for start in range(len(nodes)):
            taken: list[tuple[str, int]] = []
            for node in nodes[start:]:
                whole = len(node.free_gpus) == node.gpus > 0 and node.gpus % per_worker == 0
                if not whole or len(taken) + node.gpus > total:
                    break
                taken += [(node.id, slot) for slot in range(node.gpus)]
                if len(taken) == total:
                    return _cut(taken, per_worker)
    raise PlacementRefused(_gpu_refusal(cell, need, nodes, total, largest))


def _cut(slots: list[tuple[str, int]], per_worker: int) -> list[Place]:
    parts = [slots[i : i + per_worker] for i in range(0, len(slots), per_worker)]
    return [(part[0][0], tuple(slot for _, slot in part)) for part in parts]


def _gpu_refusal(cell: str, need: SchedulingSpec, nodes: Sequence[NodeSlots], total: int, largest: int) -> str:
    wanted = f"cell {cell} needs {total} GPUs ({need.num_workers_per_cell} workers x {need.num_gpus_per_worker})"
    offered = ", ".join(f"{node.id} {len(node.free_gpus)} of {node.gpus}" for node in nodes[:8])
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    if largest and total > largest and total % largest:
        return (
            f"{wanted}: {total // largest} whole nodes of {largest} GPUs and a tail of {total % largest}; "
            f"a cell that spans nodes takes whole ones, so ask for a multiple of {largest}. Free: {offered}{more}"
        )
    return f"{wanted} in one contiguous run of free slots; free: {offered}{more}"
