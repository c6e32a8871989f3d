"""Where the workers of a cell go. Pure: free slots in, places out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

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


class PlacementRefused(Exception):
    """A cell fits nowhere now; the text has the numbers."""


class Fleet:
    """Nodes that may take work, and what is left of them while cells are placed one after the other.

    Thousands of cells are placed on thousands of nodes at the start, so a place is found without a look at all nodes:
    the least occupied one from a heap, and free GPUs from where the last cell of that size found them, since in front
    of there nothing becomes free. Make a new Fleet when something has.

    Args:
        nodes: in the fleet's node order.
        of_pool: pool -> node -> its workers that are there already.
    """

    def __init__(self, nodes: Sequence[NodeSlots], of_pool: Mapping[str, Mapping[str, int]]) -> None:
        self._nodes = nodes
        self._at = {node.id: i for i, node in enumerate(nodes)}
        self._free = [node.free_gpus for node in nodes]
        self._cpus_used = [node.cpus_used for node in nodes]
        self._largest = max((node.gpus for node in nodes), default=0)
        self._of_pool = {pool: dict(workers) for pool, workers in of_pool.items()}
        self._heaps: dict[str, list[tuple[int, float, int]]] = {}
        """Pool -> its nodes by how occupied they were; a node's entry may be too low, never too high."""
        self._first: dict[tuple[int, int], int] = {}
        """(GPUs of a cell, of a worker) -> where such a cell may fit at the earliest."""

    def place(
        self,
        cell: str,
        pool: str,
        need: SchedulingSpec,
        *,
        hub_node: str = "",
        avoid_hub_node: bool = False,
        barred: Collection[str] = (),
        kept_back: Mapping[str, Collection[int]] | None = None,
        previous: Sequence[Place] = (),
    ) -> list[Place]:
        """Places for each worker of a cell, in worker order; nothing is taken yet.

        A GPU cell gets contiguous slots in (node, GPU) order: on one node, or whole nodes that follow each other. A CPU
        cell goes to the least occupied node; its workers stay together when they fit the node's CPUs, or `placement`
        is "pack".

        Args:
            barred: nodes that may not take this cell.
            kept_back: node -> free GPU slots that are for other cells.
            previous: where the last generation was; kept when it is still free.

        Raises:
            PlacementRefused: when no node or slot is free; nothing is taken partially.
        """
        barred = {name for name in barred if name in self._at}
        if len(barred) == len(self._nodes):
            raise PlacementRefused(f"cell {cell}: no node is alive to place its {need.num_workers_per_cell} workers on")
        back = {self._at[name]: frozenset(slots) for name, slots in (kept_back or {}).items() if name in self._at}
        if previous and all(self._is_free(node, slots, barred, back) for node, slots in previous):
            return list(previous)
        if need.num_gpus_per_worker:
            return self._place_gpus(cell, need, barred, back)
        if avoid_hub_node and len(barred | {hub_node} & self._at.keys()) < len(self._nodes):
            barred.add(hub_node)
        return self._place_cpus(pool, need, barred)

    def take(self, pool: str, need: SchedulingSpec, places: Sequence[Place]) -> None:
        """A cell has got these places."""
        for name, slots in places:
            i = self._at.get(name)
            if i is not None:
                self._free[i] -= frozenset(slots)
                self._cpus_used[i] += need.num_cpus_per_worker
                workers = self._of_pool.setdefault(pool, {})
                workers[name] = workers.get(name, 0) + 1

    def _is_free(
        self, name: str, slots: tuple[int, ...], barred: Collection[str], back: Mapping[int, frozenset[int]]
    ) -> bool:
        i = self._at.get(name)
        return i is not None and name not in barred and (self._free[i] - back.get(i, frozenset())).issuperset(slots)

    # -------------------------------------------------------------------------------------------------- CPUs
    def _occupied(self, pool: str, i: int) -> tuple[int, float, int]:
        """Round-robin: fewest workers of this pool first, then least asked of its CPUs, then node order."""
        node = self._nodes[i]
        return self._of_pool.get(pool, {}).get(node.id, 0), self._cpus_used[i] / max(node.cpus, 1.0), i

    def _place_cpus(self, pool: str, need: SchedulingSpec, barred: Collection[str]) -> list[Place]:
        workers = need.num_workers_per_cell
        if need.placement == "pack":
            return [(next(node.id for node in self._nodes if node.id not in barred), ())] * workers
        if workers == 1:
            return [(self._nodes[self._least_occupied(pool, barred)].id, ())]
        order = sorted(
            (i for i, node in enumerate(self._nodes) if node.id not in barred), key=lambda i: self._occupied(pool, i)
        )
        for i in order:
            if workers * need.num_cpus_per_worker <= self._nodes[i].cpus:
                return [(self._nodes[i].id, ())] * workers
        spread = sorted(order[:workers])
        return [(self._nodes[spread[w * len(spread) // workers]].id, ()) for w in range(workers)]

    def _least_occupied(self, pool: str, barred: Collection[str]) -> int:
        heap = self._heaps.get(pool)
        if heap is None:
            heap = self._heaps[pool] = sorted(self._occupied(pool, i) for i in range(len(self._nodes)))
        aside = []
        while True:
            i = heap[0][-1]
            now = self._occupied(pool, i)
            if heap[0] != now:
                heapq.heapreplace(heap, now)
            elif self._nodes[i].id in barred:
                aside.append(heapq.heappop(heap))
            else:
                break
        for entry in aside:
            heapq.heappush(heap, entry)
        return i

    # -------------------------------------------------------------------------------------------------- GPUs
    def _place_gpus(
        self, cell: str, need: SchedulingSpec, barred: Collection[str], back: Mapping[int, frozenset[int]]
    ) -> list[Place]:
        per_worker = need.num_gpus_per_worker
        total = per_worker * need.num_workers_per_cell
        narrowed = bool(barred or back)

        def free(i: int) -> frozenset[int]:
            if narrowed:
                return frozenset() if self._nodes[i].id in barred else self._free[i] - back.get(i, frozenset())
            return self._free[i]

        first = self._first.get((total, per_worker), 0)
        for start in range(first, len(self._nodes)):
            if total <= self._largest:
                found = self._run_on(start, total, free)
            else:
                found = self._whole_nodes_from(start, total, per_worker, free)
            if found:
                return _cut([(self._nodes[i].id, slot) for i, slot in found], per_worker)
            if not narrowed:
                self._first[total, per_worker] = start + 1
        raise PlacementRefused(self._gpu_refusal(cell, need, total, barred))

    def _run_on(self, i: int, total: int, free: Callable[[int], frozenset[int]]) -> list[tuple[int, int]]:
        slots = free(i)
        for start in range(self._nodes[i].gpus - total + 1):
            run = range(start, start + total)
            if slots.issuperset(run):
                return [(i, slot) for slot in run]
        return []

    def _whole_nodes_from(
        self, start: int, total: int, per_worker: int, free: Callable[[int], frozenset[int]]
    ) -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        for i in range(start, len(self._nodes)):
            gpus = self._nodes[i].gpus
            whole = len(free(i)) == gpus > 0 and gpus % per_worker == 0
            if not whole or len(taken) + gpus > total:
                return []
            taken += [(i, slot) for slot in range(gpus)]
            if len(taken) == total:
                return taken
        return []

    def _gpu_refusal(self, cell: str, need: SchedulingSpec, total: int, barred: Collection[str]) -> str:
        largest = self._largest
        wanted = f"cell {cell} needs {total} GPUs ({need.num_workers_per_cell} workers x {need.num_gpus_per_worker})"
        usable = [i for i, node in enumerate(self._nodes) if node.id not in barred]
        offered = ", ".join(f"{self._nodes[i].id} {len(self._free[i])} of {self._nodes[i].gpus}" for i in usable[:8])
        more = f" and {len(usable) - 8} more nodes" if len(usable) > 8 else ""
        if largest and total > largest and total % largest:
            return (
                f"{wanted}: {total // largest} whole nodes of {largest} GPUs and a tail of {total % largest}; "
                f"a cell that spans nodes takes whole ones, so ask for a multiple of {largest}. Free: {offered}{more}"
            )
        return f"{wanted} in one contiguous run of free slots; free: {offered}{more}"


def _cut(slots: list[tuple[str, int]], per_worker: int) -> list[Place]:
    parts = [slots[i : i + per_worker] for i in range(0, len(slots), per_worker)]
    return [(part[0][0], tuple(slot for _, slot in part)) for part in parts]
