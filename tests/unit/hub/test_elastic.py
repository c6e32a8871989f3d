"""Guests: nodes of a second job bring engines, which go with them and outlive the hub that wanted them."""

import pytest

from miles_hpc.hub.actions import Tick
from miles_hpc.wire.messages import Goodbye, ReservePorts, StartWorker, StopWorker

pytestmark = pytest.mark.unit


def with_guests(fleet, pool, guests=2, gpus=0, **more):
    """A run on two nodes of its own, and nodes of another job."""
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=gpus and 2, **more), nodes=2, gpus=gpus)
    for index in range(2, 2 + guests):
        f.add_agent(index, gpus=gpus)
        f.join(index)
    f.pass_time(2)
    assert set(f.phases().values()) == {"ready"}
    return f


def owners(f):
    return {cell.id: (cell.workers[0].node, cell.guest_of) for cell in f.core.cells.values() if cell.guest_of}


def test_each_guest_brings_as_many_engines_as_it_has_room_for(fleet, pool):
    assert owners(with_guests(fleet, pool)) == {
        "engine-00002": ("node-00002", "node-00002"),
        "engine-00003": ("node-00003", "node-00003"),
    }
    assert [node for node, _ in owners(with_guests(fleet, pool, gpus=4)).values()] == ["node-00002"] * 2 + [
        "node-00003"
    ] * 2


def test_engines_go_with_their_guest_and_nobody_places_them_elsewhere(fleet, pool):
    f = with_guests(fleet, pool)
    f.clear()
    f.receive(f.agents[2].peer, Goodbye(reason="its job ends"))
    f.pass_time(20)
    assert f.phases()["engine-00002"] == "stopped" and f.phases()["engine-00003"] == "ready"
    assert not f.orders(ReservePorts, StartWorker) and not f.verdicts


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (3, 0, 1, 2), (0, 1, 3, 2)])
def test_a_new_hub_takes_the_engines_of_guests_as_they_are_in_whatever_order_it_hears_of_them(fleet, pool, order):
    f = with_guests(fleet, pool, gpus=4)
    before = owners(f), {cell.id: cell.generation for cell in f.core.cells.values()}
    f.next_hub()
    for index in order:
        f.join(index)
        f.apply(Tick())
        f.settle()
    f.pass_time(30)
    assert (owners(f), {cell.id: cell.generation for cell in f.core.cells.values()}) == before
    assert set(f.phases().values()) == {"ready"} and len(f.core.cells) == 6
    assert not f.orders(ReservePorts, StartWorker, StopWorker) and not f.verdicts
    # Each still goes with its own node.
    f.receive(f.agents[3].peer, Goodbye(reason="its job ends"))
    f.pass_time(5)
    assert [name for name, phase in f.phases().items() if phase == "stopped"] == ["engine-00004", "engine-00005"]


def test_a_guest_without_engines_gets_new_ones_from_the_new_hub(fleet, pool):
    f = with_guests(fleet, pool)
    f.next_hub()
    f.agents[2].table.clear()
    for index in (3, 2, 1, 0):
        f.join(index)
    f.pass_time(5)
    assert owners(f)["engine-00003"] == ("node-00003", "node-00003")
    assert [cell for cell, (node, _) in owners(f).items() if node == "node-00002"] == ["engine-00004"]


def test_a_worker_that_is_no_engine_of_this_run_is_stopped_on_a_guest(fleet, pool):
    f = with_guests(fleet, pool, guests=1)
    row = f.agents[2].table.pop("engine-00002-00000")
    f.agents[2].table["other-00007-00000"] = type(row)(
        **{**{field: getattr(row, field) for field in row.__struct_fields__}, "worker": "other-00007-00000"}
    )
    f.next_hub()
    for index in (0, 1, 2):
        f.join(index)
    f.pass_time(5)
    assert [order.worker for order in f.orders(StopWorker)] == ["other-00007-00000"]
