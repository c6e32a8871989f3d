"""Where cells go."""

import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.placement import Fleet, NodeSlots, PlacementRefused
from miles_hpc.specs.base import SchedulingSpec

pytestmark = pytest.mark.unit


def node(index: int, gpus: int = 0, free: set[int] | None = None, **more: float) -> NodeSlots:
    taken = frozenset(range(gpus)) if free is None else frozenset(free)
    return NodeSlots(id=f"n{index}", cpus=more.pop("cpus", 8.0), gpus=gpus, free_gpus=taken, **more)


def place(cell: str, need: SchedulingSpec, nodes: list[NodeSlots], **how):
    return Fleet(nodes, {}).place(cell, "pool", need, **how)


def test_cells_of_a_pool_go_round_the_nodes(fleet, pool):
    f = fleet(pool("engine", num_cells=4), nodes=2)
    assert [cell[0][0] for cell in f.places("engine")] == ["node-00000", "node-00001", "node-00000", "node-00001"]


def test_a_stateful_cpu_cell_avoids_the_hubs_node_when_there_is_another(fleet, pool):
    f = fleet(pool("driver", state="stateful", restart="fail_run"), nodes=2)
    assert f.places("driver") == [[("node-00001", ())]]


def test_a_stateful_cpu_cell_uses_the_hubs_node_when_it_is_the_only_one(fleet, pool):
    f = fleet(pool("driver", state="stateful", restart="fail_run", avoid_hub_node=True))
    assert f.places("driver") == [[("node-00000", ())]]


def test_a_cell_of_several_workers_stays_on_one_node_when_its_cpus_suffice():
    need = SchedulingSpec(num_workers_per_cell=4, num_cpus_per_worker=2.0)
    assert place("t", need, [node(0), node(1)]) == [("n0", ())] * 4


def test_a_cell_larger_than_every_node_spreads_in_blocks():
    need = SchedulingSpec(num_workers_per_cell=4, num_cpus_per_worker=2.0)
    assert [n for n, _ in place("t", need, [node(0, cpus=4.0), node(1, cpus=4.0)])] == ["n0", "n0", "n1", "n1"]


def test_a_packed_cell_stays_together_even_when_its_cpus_do_not_suffice():
    need = SchedulingSpec(num_workers_per_cell=4, num_cpus_per_worker=2.0, placement="pack")
    assert place("t", need, [node(0, cpus=1.0), node(1, cpus=1.0)]) == [("n0", ())] * 4


def test_gpu_slots_are_contiguous_and_in_order():
    need = SchedulingSpec(num_workers_per_cell=2, num_gpus_per_worker=2)
    assert place("e", need, [node(0, 4, {1, 2, 3}), node(1, 4)]) == [("n1", (0, 1)), ("n1", (2, 3))]
    assert place("e", need, [node(0, 8, {1, 3, 4, 5, 6, 7})]) == [("n0", (3, 4)), ("n0", (5, 6))]


def test_a_cell_over_several_nodes_takes_whole_neighbouring_ones():
    need = SchedulingSpec(num_workers_per_cell=4, num_gpus_per_worker=2)
    nodes = [node(0, 4), node(1, 4, {1, 2, 3}), node(2, 4), node(3, 4)]
    assert place("e", need, nodes) == [("n2", (0, 1)), ("n2", (2, 3)), ("n3", (0, 1)), ("n3", (2, 3))]


def test_a_cell_that_fits_one_node_is_not_spread_over_smaller_ones():
    need = SchedulingSpec(num_workers_per_cell=2, num_gpus_per_worker=2)
    assert place("e", need, [node(0, 2), node(1, 2), node(2, 4)]) == [("n2", (0, 1)), ("n2", (2, 3))]


def test_the_next_cell_of_a_size_follows_the_last_one():
    need = SchedulingSpec(num_gpus_per_worker=1)
    fleet = Fleet([node(0, 2, {}), node(1, 2), node(2, 2)], {})
    places = []
    for _ in range(4):
        places += fleet.place("e", "p", need)
        fleet.take("p", need, places[-1:])
    assert places == [("n1", (0,)), ("n1", (1,)), ("n2", (0,)), ("n2", (1,))]


def test_a_partial_tail_is_refused_with_the_numbers():
    need = SchedulingSpec(num_workers_per_cell=6, num_gpus_per_worker=1)
    with pytest.raises(PlacementRefused, match=r"needs 6 GPUs.*1 whole nodes of 4 GPUs and a tail of 2.*multiple of 4"):
        place("e", need, [node(0, 4), node(1, 4)])


def test_too_few_free_gpus_are_refused_with_what_is_free():
    need = SchedulingSpec(num_gpus_per_worker=3)
    with pytest.raises(PlacementRefused, match=r"cell e needs 3 GPUs \(1 workers x 3\).*n0 2 of 4"):
        place("e", need, [node(0, 4, {0, 1})])


@pytest.mark.parametrize(("nodes", "says"), [(8, "n7 1 of 2"), (9, "n7 1 of 2 and 1 more nodes")])
def test_a_refusal_lists_the_first_nodes_and_counts_the_others(nodes, says):
    need = SchedulingSpec(num_gpus_per_worker=2)
    with pytest.raises(PlacementRefused, match=f"{says}$"):
        place("e", need, [node(index, 2, {0}) for index in range(nodes)])


def test_the_last_place_is_kept_when_it_is_free():
    need = SchedulingSpec(num_gpus_per_worker=1)
    nodes = [node(0, 2), node(1, 2)]
    assert place("e", need, nodes, previous=[("n1", (1,))]) == [("n1", (1,))]
    assert place("e", need, [node(0, 2)], previous=[("n1", (1,))]) == [("n0", (0,))]


def test_no_node_is_a_refusal():
    with pytest.raises(PlacementRefused, match="no node is alive"):
        place("e", SchedulingSpec(), [])


def test_a_cell_that_can_never_fit_ends_the_run_with_the_numbers(fleet, pool):
    f = fleet(pool("engine", num_cells=3, num_gpus_per_worker=2), gpus=4)
    (verdict,) = f.verdicts
    assert "engine-00002 needs 2 GPUs" in verdict.reason and "node-00000 0 of 4" in verdict.reason


def test_what_was_never_placed_waits_for_a_node_that_is_silent(fleet, pool):
    heal = HealConfig(backoff_s=20.0, max_backoff_s=20.0)
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=1), nodes=2, gpus=1, join=False, heal=heal)
    f.agents[1].reserve_error = "busy"
    for index in range(2):
        f.join(index)
    f.settle()
    f.agents[1].silent = True
    f.pass_time(21.0)
    assert f.cell("engine-00001").unplaced_since is not None and not f.core.nodes["node-00001"].strays
    assert f.phases() == {"engine-00000": "ready", "engine-00001": "waiting"} and not f.verdicts
    f.pass_time(f.timing.join + 1)
    (verdict,) = f.verdicts
    assert verdict.outcome == "failed" and "nothing became free within 60 s (timing.join)" in verdict.reason


def test_a_worker_gets_the_uuids_and_indices_of_its_slots(fleet, pool):
    from miles_hpc.wire.messages import StartWorker

    spec = pool(
        "engine", num_workers_per_cell=2, num_gpus_per_worker=2, launch_command=lambda c: [str(c.local_gpu_ids)]
    )
    f = fleet(spec, gpus=4)
    assert [o.gpu_uuids for o in f.orders(StartWorker)] == [["GPU-0-0", "GPU-0-1"], ["GPU-0-2", "GPU-0-3"]]
    assert [o.argv for o in f.orders(StartWorker)] == [["(0, 1)"], ["(2, 3)"]]


def test_spare_nodes_get_work_only_in_place_of_others(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=3, spare_nodes=1)
    assert {cell[0][0] for cell in f.places("engine")} == {"node-00000", "node-00001"}
    f.agents[1].silent = True
    f.pass_time(12)
    assert {cell[0][0] for cell in f.places("engine")} == {"node-00000", "node-00002"}


def test_cells_that_are_placed_one_after_the_other_do_not_meet():
    fleet = Fleet([node(0, 4), node(1, 4, {0, 1, 3}), node(2, 4)], {})
    pair, one = SchedulingSpec(num_gpus_per_worker=2), SchedulingSpec(num_gpus_per_worker=1)
    found = []
    for need in (pair, one, pair, pair, one, pair, one):
        found.append(fleet.place("e", "p", need))
        fleet.take("p", need, found[-1])
    assert found == [
        [("n0", (0, 1))],
        [("n0", (2,))],
        [("n1", (0, 1))],
        [("n2", (0, 1))],
        [("n0", (3,))],
        [("n2", (2, 3))],
        [("n1", (3,))],
    ]
    with pytest.raises(PlacementRefused):
        fleet.place("e", "p", one)


def test_slots_that_are_kept_back_and_barred_nodes_are_for_others_alone():
    fleet = Fleet([node(0, 2), node(1, 2), node(2, 2)], {})
    need = SchedulingSpec(num_gpus_per_worker=2)
    assert fleet.place("e", "p", need, barred=["n0"], kept_back={"n1": [1], "elsewhere": [0]}) == [("n2", (0, 1))]
    assert fleet.place("e", "p", need, previous=[("n1", (0, 1))], kept_back={"n1": [1]}) == [("n0", (0, 1))]
    assert fleet.place("e", "p", need) == [("n0", (0, 1))]
    with pytest.raises(PlacementRefused, match="no node is alive"):
        fleet.place("e", "p", need, barred=["n0", "n1", "n2"])


def test_cpu_cells_go_to_the_least_occupied_node_that_may_take_them():
    fleet = Fleet([node(0), node(1, cpus_used=4.0), node(2)], {"p": {"n0": 1}})
    need = SchedulingSpec()
    found = []
    for pool in ("p", "p", "q", "p", "q", "q", "p"):
        (place,) = fleet.place("c", pool, need, hub_node="n2", avoid_hub_node=pool == "q")
        found.append(place[0])
        fleet.take(pool, need, [place])
    assert found == ["n2", "n1", "n0", "n0", "n1", "n0", "n2"]
    assert fleet.place("c", "p", need, barred=["n2", "n1"]) == [("n0", ())]
    assert fleet.place("c", "p", need, barred=["n0", "n1"], hub_node="n2", avoid_hub_node=True) == [("n2", ())]


def test_the_thousandth_cell_is_found_as_quickly_as_the_first(monkeypatch):
    """Nodes that are looked at, not seconds."""
    looks = 0
    occupied = Fleet._occupied

    def counted(self, pool, i):
        nonlocal looks
        looks += 1
        return occupied(self, pool, i)

    monkeypatch.setattr(Fleet, "_occupied", counted)
    fleet = Fleet([node(i, 2) for i in range(1000)], {})
    for need in (SchedulingSpec(), SchedulingSpec(num_gpus_per_worker=2)):
        for _ in range(1000):
            fleet.take("p", need, fleet.place("c", "p", need))
    assert looks <= 1000 + 3 * 1000
