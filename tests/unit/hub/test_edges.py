"""Edges that a flipped operator would move unseen; found by tools/mutate-hub."""

import msgspec
import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub import drain
from miles_hpc.hub.actions import Send, Tick
from miles_hpc.hub.core import FENCE_SLACK_S, Phase
from miles_hpc.hub.healing import may_start
from miles_hpc.hub.lifecycle import PLACED_LATER_S
from miles_hpc.hub.placement import Fleet, NodeSlots
from miles_hpc.hub.site import SiteSeen
from miles_hpc.specs.base import SchedulingSpec
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    Draining,
    Goodbye,
    Heartbeat,
    Progress,
    Refused,
    ReservePorts,
    Roster,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerReady,
)

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


def test_the_least_occupied_node_is_judged_by_share_and_not_by_number():
    large = NodeSlots("large", cpus=8.0, gpus=0, free_gpus=frozenset(), cpus_used=4.0)
    small = NodeSlots("small", cpus=2.0, gpus=0, free_gpus=frozenset(), cpus_used=1.2)
    assert Fleet([small, large], {}).place("c", "p", SchedulingSpec()) == [("large", ())]
    unused = NodeSlots("unused", cpus=1.0, gpus=0, free_gpus=frozenset())
    assert unused.cpus_used == 0
    assert Fleet([large, unused], {}).place("c", "p", SchedulingSpec()) == [("unused", ())]


def test_a_worker_that_was_placed_just_now_counts_as_one_that_was_there_before():
    nodes = [NodeSlots(name, cpus=4.0, gpus=0, free_gpus=frozenset()) for name in ("a", "b")]
    fleet, need, found = Fleet(nodes, {"p": {"b": 1}}), SchedulingSpec(num_cpus_per_worker=0), []
    for _ in range(4):
        places = fleet.place("c", "p", need)
        fleet.take("p", need, places)
        found.append(places[0][0])
    assert found == ["a", "a", "b", "a"]


def test_a_stray_on_a_dead_node_may_still_run_until_just_after_the_fence(fleet, pool):
    f = fleet(pool("driver", state="stateful"), nodes=2)
    cell, node = f.cell("driver-00000"), f.core.nodes["node-00001"]
    node.strays |= dict.fromkeys(("driver-00000-00000", "other-00000-00000"), Generation(1, 0))
    node.condition = "dead"
    f.core.now = node.last_heard + f.timing.fence + FENCE_SLACK_S
    assert not may_start(f.core, cell)
    f.core.now += 0.1
    assert may_start(f.core, cell)
    node.condition = "suspect"
    assert not may_start(f.core, cell)


def test_a_cell_that_fits_nowhere_for_long_is_looked_at_once_a_second(fleet, pool):
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=1), nodes=2, gpus=1)
    (lost,) = [cell for cell in f.core.pools["engine"] if cell.workers[0].node == "node-00001"]
    f.agents[1].silent = True
    f.pass_time(f.timing.dead + PLACED_LATER_S - 1)
    assert lost.phase is Phase.WAITING and lost.retry_at <= f.now
    f.pass_time(5)
    assert f.now < lost.retry_at <= f.now + 1.0


def test_of_two_generations_of_a_cell_a_new_hub_adopts_the_newer_one(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    first, second = f.agents
    (row,) = first.table.values()
    second.table[row.worker] = msgspec.structs.replace(row, generation=Generation(1, 2), pid=999)
    f.next_hub()
    f.join(0)
    f.join(1)
    f.apply(Tick())
    engine = f.cell("engine-00000")
    assert engine.generation == Generation(1, 2) and engine.workers[0].node == "node-00001"
    assert [(order.worker, order.generation) for order in f.orders(StopWorker)] == [(row.worker, Generation(1, 1))]


def test_a_cell_that_is_half_ready_is_adopted_as_starting(fleet, pool):
    f = fleet(pool("trainer", num_workers_per_cell=2))
    (agent,) = f.agents
    row = agent.table["trainer-00000-00001"]
    agent.table[row.worker] = msgspec.structs.replace(row, state="starting")
    f.next_hub()
    f.join(0)
    f.apply(Tick())
    assert f.phases() == {"trainer-00000": "starting"}
    f.receive(agent.peer, WorkerReady(worker=row.worker, generation=row.generation))
    assert f.phases() == {"trainer-00000": "ready"}


def test_an_agent_that_left_is_not_heard(fleet, pool):
    f = fleet(pool("engine"), nodes=4)
    f.receive(f.agents[3].peer, Goodbye(reason="done"))
    f.agents[3].left = True
    f.agents[1].silent = f.agents[2].silent = True
    f.pass_time(5)
    assert f.core.nodes["node-00003"].condition == "alive" and not f.core.standing.acts


def test_a_stateful_worker_of_a_dead_node_is_gone_just_after_the_fence(fleet, pool):
    f = fleet(pool("driver", state="stateful", avoid_hub_node=True), nodes=2)
    f.agents[1].silent = True
    f.pass_time(f.core.timing.fence + 5.0)
    assert f.phases() == {"driver-00000": "stopping"}
    f.pass_time(1.0)
    assert f.phases() == {"driver-00000": "ready"}


def test_a_silent_node_that_ran_nothing_is_still_waited_for(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=2), nodes=2, gpus=2)
    assert f.cell("engine-00000").workers[0].node == "node-00000"
    f.agents[1].silent = True
    f.pass_time(12)
    f.core.nodes["node-00000"].gpu_holders[1] = ("somebody-00000-00000", Generation(1, 9))
    f.die("engine-00000-00000")
    f.core.nodes["node-00000"].gpu_holders[1] = ("somebody-00000-00000", Generation(1, 9))
    f.pass_time(5)
    assert not f.verdicts


def test_a_death_counts_to_the_last_moment_of_the_window(fleet, pool):
    f = fleet(pool("engine"), heal=HealConfig(budget=1, window_s=60.0, backoff_s=0.0))
    f.die("engine-00000-00000")
    f.now += 60.0
    f.die("engine-00000-00000")
    assert f.verdicts[0].outcome == "failed"


def test_one_node_works_however_many_are_spare(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2, spare_nodes=2)
    assert f.places("engine") == [[("node-00000", ())], [("node-00000", ())]]


def test_a_slot_that_somebody_took_meanwhile_is_not_kept(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=2), gpus=4)
    f.core.nodes["node-00000"].gpu_holders[1] = ("somebody-00000-00000", Generation(1, 9))
    f.die("engine-00000-00000")
    assert f.places("engine") == [[("node-00000", (2, 3))]]


def test_a_node_that_is_heard_again_is_not_down(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    f.agents[2].silent = True
    f.pass_time(12)
    f.apply(SiteSeen(down_hosts=frozenset({"host2"})))
    assert f.core.nodes["node-00002"].down and f.core.drain is None
    f.resume(2)
    f.pass_time(1)
    assert not f.core.nodes["node-00002"].down


def test_nodes_that_the_site_does_not_name_and_those_that_are_heard_are_not_down(fleet, pool):
    f = fleet(pool("driver", state="stateful", avoid_hub_node=True), nodes=3)
    home = f.cell("driver-00000").workers[0].node
    f.agents[int(home[-5:])].silent = True
    f.pass_time(f.timing.dead + 2)
    assert f.core.nodes[home].condition == "dead"
    f.apply(SiteSeen(down_hosts=frozenset({"host0"})))
    assert not any(node.down for node in f.core.nodes.values())
    assert f.phases() == {"driver-00000": "stopping"}  # until its node is fenced


def test_an_order_that_a_table_has_crossed_is_repeated_only_when_it_is_overdue(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2))
    f.agents[0].silent = True
    f.die("engine-00000-00000", settle=False)
    f.table(0)
    assert len(f.orders(StopWorker)) == 1
    f.now += f.timing.suspect + 0.5
    f.table(0)
    assert len(f.orders(StopWorker)) == 2


def test_a_cell_is_ready_when_all_its_workers_are(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2), join=False)
    f.join(0)
    cell = f.cell("engine-00000")
    while not any(worker.ready for worker in cell.workers):
        f.receive(*f.reports.pop(0))
    assert f.phases() == {"engine-00000": "starting"}
    f.settle()
    assert f.phases() == {"engine-00000": "ready"}


def test_an_agent_that_leaves_costs_its_cells_no_budget(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2)
    f.agents[1].table.clear()
    f.agents[1].left = True
    f.receive(f.agents[1].peer, Goodbye(reason="another job wants the node"))
    f.pass_time(1)
    assert set(f.phases().values()) == {"ready"} and not any(cell.deaths for cell in f.core.cells.values())


def test_a_table_makes_nothing_ready_that_only_starts_and_repeats_no_order_for_it(fleet, pool):
    f = fleet(pool("trainer", num_workers_per_cell=2))
    (agent,) = f.agents
    row = agent.table["trainer-00000-00001"]
    agent.table[row.worker] = msgspec.structs.replace(row, state="starting")
    f.next_hub()
    f.join(0)
    f.pass_time(10)
    f.clear()
    f.table(0)
    assert f.phases() == {"trainer-00000": "starting"} and not f.orders(ReservePorts, StartWorker)


def test_the_end_of_a_worker_is_a_warning_until_the_run_itself_ends(fleet, pool):
    f = fleet(pool("engine"))

    def level():
        f.die("engine-00000-00000")
        return [note.level for note in f.notes if note.event == "worker_exited"][-1]

    assert level() == "warning"
    f.pass_time(1)
    f.core.decide("cancelled", "enough")
    assert level() == "info"


def test_an_order_is_taken_for_lost_only_when_it_is_older_than_a_suspicion(fleet, pool):
    f = fleet(pool("engine"))
    f.agents[0].silent = True  # the order waits in its connection
    f.die("engine-00000-00000", settle=False)
    f.apply(Tick())
    ordered = f.cell("engine-00000").workers[0].ordered_at
    f.clear()
    f.now = ordered + f.timing.suspect
    f.table(0)
    assert not f.orders(ReservePorts)
    f.now += 0.01
    f.table(0)
    assert [order.worker for order in f.orders(ReservePorts)] == ["engine-00000-00000"]


def test_a_group_waits_for_its_next_try_as_a_whole(fleet, pool):
    unit = {"group": "training", "state": "stateful"}
    heal = HealConfig(budget=5, backoff_s=8.0, max_backoff_s=60.0)
    f = fleet(pool("driver", **unit), pool("trainer", **unit), heal=heal)
    f.die("trainer-00000-00000")
    f.pass_time(1)
    assert set(f.phases().values()) == {"ready"}, "the first death is healed at once"
    f.die("trainer-00000-00000")
    f.pass_time(7)
    assert set(f.phases().values()) == {"waiting"}, "the part that ends because another did, too"
    f.pass_time(2)
    assert set(f.phases().values()) == {"ready"}
    assert len(f.core.group_deaths["training"]) == 2


def test_a_death_counts_against_its_node_until_it_is_older_than_the_window(fleet, pool):
    f = fleet(pool("engine"), nodes=2, heal=HealConfig(window_s=100.0, quarantine=2))
    f.die("engine-00000-00000", settle=False)
    died, deaths = f.now, f.core.nodes["node-00000"].deaths
    for later, left in ((100.0, 1), (100.5, 0)):
        f.now = died + later
        for agent in f.agents:
            f.receive(agent.peer, Heartbeat(seq=1))
        f.apply(Tick())
        assert len(deaths) == left


def test_the_address_book_is_made_only_when_something_in_it_may_have_changed(fleet, pool):
    f = fleet(pool("engine"))
    assert f.state.book and not f.core.book_dirty
    f.die("engine-00000-00000", settle=False)
    assert not f.core.book_dirty and f.state.book == {"engine": []}


def test_a_small_fleet_hears_of_a_second_hello_of_the_same_moment(fleet, pool):
    f = fleet(pool("engine"), nodes=2, join=False)
    for index in (0, 1):
        f.join(index, peer_port=40000 + index)
        f.apply(Tick())
    rosters = [[peer.port for peer in roster.peers] for roster in f.orders(Roster)]
    assert rosters == [[40000], [40000, 40001], [40000, 40001]]


def test_a_run_is_ready_when_the_last_of_its_cells_is(fleet, pool):
    f = fleet(pool("engine", num_cells=2), join=False)
    f.join(0)
    while "ready" not in f.phases().values():
        f.receive(*f.reports.pop(0))
    assert sorted(f.phases().values()) != ["ready", "ready"] and f.core.ready_at is None
    f.now += 3.0
    f.settle()
    assert set(f.phases().values()) == {"ready"} and f.core.ready_at == f.now


def test_the_first_step_is_the_first_that_was_made_and_only_once(fleet, pool):
    f = fleet(pool("driver", category="driver"))
    peer = f.client("driver-00000-00000")
    f.receive(peer, Progress(step=0, weight_version=1))
    assert f.core.first_step_at is None
    f.now += 0.5
    f.receive(peer, Progress(step=1, weight_version=2))
    first = f.core.first_step_at
    f.now += 0.5
    f.receive(peer, Progress(step=2, weight_version=3))
    assert first == f.now - 0.5 == f.core.first_step_at


def test_a_start_that_never_reached_its_agent_is_sent_again(fleet, pool):
    f = fleet(pool("engine"))
    row = f.agents[0].table["engine-00000-00000"]
    f.cell("engine-00000").workers[0].ready = False
    f.core.change_phase(f.cell("engine-00000"), Phase.STARTING)
    f.agents[0].table["engine-00000-00000"] = msgspec.structs.replace(row, state="reserved", pid=0)
    f.clear()
    f.pass_time(f.timing.suspect + 0.5)
    f.agents[0].silent = True
    f.table(0)
    assert [order.worker for order in f.orders(StartWorker)] == ["engine-00000-00000"]
