"""A node that eats cells gets no new work while others can take it."""

import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.actions import Tick

pytestmark = pytest.mark.unit

HEAL = HealConfig(budget=20, backoff_s=0.0, window_s=60.0, quarantine=3)


def nodes_of(f, pool):
    return [cell.workers[0].node for cell in f.core.pools[pool] if cell.workers]


def eat(f, *cells):
    for cell in cells:
        f.die(f"{cell}-00000")
        f.pass_time(1)


def test_deaths_of_several_cells_on_one_node_move_the_next_starts_elsewhere(fleet, pool):
    f = fleet(pool("engine", num_cells=4), nodes=2, heal=HEAL)
    bad = [cell.id for cell in f.core.pools["engine"] if cell.workers[0].node == "node-00001"]
    eat(f, bad[0], bad[1])
    assert nodes_of(f, "engine").count("node-00001") == 2
    eat(f, bad[0])
    assert f.cell(bad[0]).workers[0].node == "node-00000"
    assert f.cell(bad[1]).workers[0].node == "node-00001", "what runs there goes on"
    assert any(note.event == "node_quarantined" and note.fields["node"] == "node-00001" for note in f.notes)


def test_a_single_cell_that_dies_again_and_again_is_not_the_nodes_fault(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2, heal=HEAL)
    eat(f, *["engine-00001"] * 5)
    assert not any(node.quarantined for node in f.core.nodes.values())


def test_the_only_node_goes_on_working(fleet, pool):
    f = fleet(pool("engine", num_cells=2), heal=HEAL)
    eat(f, *["engine-00000", "engine-00001"] * 3)
    assert f.core.nodes["node-00000"].quarantined and set(f.phases().values()) == {"ready"}


def test_a_quiet_window_ends_the_quarantine(fleet, pool):
    f = fleet(pool("engine", num_cells=4), nodes=2, heal=HEAL)
    bad = [cell.id for cell in f.core.pools["engine"] if cell.workers[0].node == "node-00001"]
    eat(f, bad[0], bad[1], bad[0])
    assert f.core.nodes["node-00001"].quarantined
    f.pass_time(62)
    assert not f.core.nodes["node-00001"].quarantined


def test_zero_never_quarantines(fleet, pool):
    f = fleet(pool("engine", num_cells=4), nodes=2, heal=HealConfig(budget=20, backoff_s=0.0, quarantine=0))
    eat(f, *["engine-00001", "engine-00003"] * 3)
    assert not any(node.quarantined for node in f.core.nodes.values())


def test_a_lost_node_is_not_blamed_for_its_cells(fleet, pool):
    f = fleet(pool("engine", num_cells=6), nodes=2, heal=HEAL)
    f.agents[1].silent = True
    f.pass_time(15)
    assert not f.core.nodes["node-00001"].deaths


def test_a_cell_that_fits_nowhere_else_goes_to_the_quarantined_node(fleet, pool):
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=2), nodes=2, gpus=2, heal=HEAL)
    f.core.nodes["node-00001"].quarantined = True
    (victim,) = [cell.id for cell in f.core.pools["engine"] if cell.workers[0].node == "node-00001"]
    f.die(f"{victim}-00000")
    f.apply(Tick())
    f.settle()
    assert set(f.phases().values()) == {"ready"} and not f.verdicts
