"""Edges that a flipped operator would move unseen; found by tools/mutate-hub."""

import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub import drain
from miles_hpc.hub.actions import Send
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Draining, Refused, ReservePorts, Welcome

pytestmark = pytest.mark.unit


def test_a_cell_does_not_go_back_to_a_node_that_is_suspect_by_now(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2, heal=HealConfig(backoff_s=6.0, max_backoff_s=6.0))
    (victim,) = [cell for cell in f.core.pools["engine"] if cell.workers[0].node == "node-00001"]
    f.die(f"{victim.id}-00000")
    f.pass_time(1)
    f.die(f"{victim.id}-00000")
    assert victim.retry_at > f.now
    f.agents[1].silent = True
    f.pass_time(7)
    assert f.core.nodes["node-00001"].condition == "suspect"
    assert victim.workers[0].node == "node-00000" and victim.phase.value == "ready"


def test_a_cell_is_not_placed_beside_its_own_old_process(fleet, pool):
    f = fleet(pool("engine"))
    f.core.nodes["node-00000"].strays["engine-00000-00000"] = Generation(1, 0)
    f.clear()
    f.die("engine-00000-00000")
    f.pass_time(1)
    assert f.phases()["engine-00000"] == "waiting" and not f.orders(ReservePorts) and not f.verdicts
    f.core.nodes["node-00000"].strays.clear()
    f.pass_time(1)
    assert f.phases()["engine-00000"] == "ready"


def test_a_stray_of_another_cell_keeps_nobody_away(fleet, pool):
    f = fleet(pool("engine"), pool("other"))
    f.core.nodes["node-00000"].strays["other-00000-00000"] = f.cell("other-00000").generation
    f.die("engine-00000-00000")
    f.pass_time(0.5)
    assert f.phases()["engine-00000"] == "ready"


def test_a_cell_that_fits_nowhere_waits_while_a_node_is_only_suspect(fleet, pool):
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=2), nodes=2, gpus=2)
    (victim,) = [cell for cell in f.core.pools["engine"] if cell.workers[0].node == "node-00001"]
    f.agents[1].silent = True
    f.pass_time(15)
    assert victim.phase.value == "waiting" and not f.verdicts
    f.resume(1)
    f.table(1)
    f.pass_time(5)
    assert set(f.phases().values()) == {"ready"} and not f.verdicts


def test_one_death_in_a_group_is_counted_once(fleet, pool):
    unit = {"group": "training", "state": "stateful"}
    f = fleet(pool("driver", **unit), pool("executor", **unit), pool("trainer", num_workers_per_cell=2, **unit))
    f.die("executor-00000-00000")
    f.pass_time(1)
    assert len(f.core.group_deaths["training"]) == 1 and not any(cell.deaths for cell in f.core.cells.values())


def test_equal_versions_are_welcome_and_others_are_refused(fleet, pool):
    f = fleet(pool("engine"), nodes=2, join=False, package_version="1.2", digest="aa")
    f.join(0, package_version="1.2", digest="aa")
    assert f.orders(Welcome)
    f.join(1, package_version="1.3", digest="aa")
    f.join(1, package_version="1.2", digest="bb")
    assert [refused.code for refused in f.orders(Refused)] == ["version", "digest"]


@pytest.mark.parametrize(("left", "deadline"), [(100.0, 75.0), (0.5, 1.0)])
def test_the_walltime_clock_leaves_time_to_stop(fleet, pool, left, deadline):
    f = fleet(pool("driver", category="driver"), drain_margin_s=120.0)
    peer = f.client("driver-00000-00000")
    drain.on_time_left(f.core, 120.0)
    assert f.core.drain is None
    drain.on_time_left(f.core, left)
    assert Send(peer, Draining(reason=f.core.drain.reason, deadline_s=deadline)) in f.core.out
