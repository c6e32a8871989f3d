"""A hub acts for the run only while it hears enough of it."""

import pytest

from miles_hpc.hub.actions import HubSignalled, Tick
from miles_hpc.wire.messages import (
    CancelRun,
    Done,
    DrainRun,
    Failed,
    HoldCells,
    LeaseRenewed,
    Peer,
    ReservePorts,
    RestartCell,
    Roster,
    Standing,
    StartCell,
    StopCell,
    WorkerExited,
)

pytestmark = pytest.mark.unit


def silent(f, *indices):
    for index in indices:
        f.agents[index].silent = True


def test_a_hub_that_hears_a_majority_acts_without_any_lease(fleet, pool):
    f = fleet(pool("engine", num_cells=3), nodes=3)
    f.lease = False
    silent(f, 2)
    f.pass_time(15)
    assert f.core.nodes["node-00002"].condition == "dead"
    assert {w.node for cell in f.core.pools["engine"] for w in cell.workers} == {"node-00000", "node-00001"}


def test_a_hub_that_hears_less_than_half_declares_nobody_dead_and_places_nothing(fleet, pool):
    f = fleet(pool("engine", num_cells=3), nodes=3)
    silent(f, 1, 2)
    f.pass_time(3.5)
    f.clear()
    f.receive(f.agents[0].peer, WorkerExited(worker="engine-00000-00000", generation=f.cell("engine-00000").generation))
    f.pass_time(60)
    assert {node.condition for node in f.core.nodes.values()} == {"alive", "suspect"}
    assert not f.orders(ReservePorts) and not f.verdicts


def test_a_hub_of_one_node_that_does_not_hear_it_does_not_act(fleet, pool):
    f = fleet(pool("engine"))
    f.lease = False
    silent(f, 0)
    f.pass_time(60)
    assert f.core.nodes["node-00000"].condition == "suspect" and not f.core.standing.acts


def test_a_lease_counts_for_eight_seconds(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.lease = False
    silent(f, 1)
    f.core.standing.lease_renewed_at = f.now
    f.pass_time(8)
    assert f.core.standing.acts
    f.pass_time(0.5)
    assert not f.core.standing.acts


def test_when_all_nodes_have_left_there_is_nobody_to_hear(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    silent(f, 0, 1, 2)
    f.pass_time(5)
    assert not f.core.standing.acts
    for node in f.core.nodes.values():
        node.down = True
    f.apply(Tick())
    assert f.core.standing.acts, "those that are known to be down cannot act either"


def test_it_lets_its_lease_go_after_a_while_and_takes_it_up_when_the_others_are_heard_again(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    silent(f, 1, 2)
    f.pass_time(5)
    assert f.standings[-1] == Standing(acts=False, lease=True)
    f.pass_time(10)
    assert f.standings[-1] == Standing(acts=False, lease=False)
    f.resume(1)
    f.pass_time(1)
    assert f.standings[-1] == Standing(acts=True, lease=True)


@pytest.mark.parametrize(("lease", "condition"), [(True, "dead"), (False, "suspect")])
def test_at_exactly_half_the_lease_decides(fleet, pool, lease, condition):
    f = fleet(pool("engine"), nodes=2)
    f.lease = lease
    silent(f, 1)
    f.pass_time(20)
    assert f.core.nodes["node-00001"].condition == condition
    assert f.standings[-1] == Standing(acts=lease, lease=True)


def test_the_lease_counts_only_from_the_agent_beside_the_hub(fleet, pool):
    f = fleet(pool("engine"), nodes=2, hub_node="node-00001")
    f.lease = False
    f.receive(f.agents[0].peer, LeaseRenewed(counter=1))
    assert f.core.standing.lease_renewed_at < 0
    f.receive(f.agents[1].peer, LeaseRenewed(counter=1))
    assert f.core.standing.lease_renewed_at == f.now


def test_nodes_that_left_or_are_known_to_be_down_do_not_count(fleet, pool):
    f = fleet(pool("engine"), nodes=4)
    f.lease = False
    silent(f, 1, 2, 3)
    f.pass_time(5)
    assert not f.core.standing.acts
    for index in (2, 3):
        f.core.nodes[f"node-0000{index}"].down = True
    f.apply(Tick())
    assert not f.core.standing.acts, "exactly half, and no lease"
    f.core.nodes["node-00001"].left = True
    f.apply(Tick())
    assert f.core.standing.acts


def test_a_decision_waits_until_the_hub_may_act_again(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    silent(f, 1, 2)
    f.pass_time(5)
    f.apply(HubSignalled("SIGINT"))
    f.pass_time(1)
    assert not f.verdicts
    f.resume(1)
    f.pass_time(1)
    assert (f.verdicts[0].outcome, f.verdicts[0].reason) == ("cancelled", "the hub got SIGINT")


def test_orders_are_refused_until_the_hub_may_act_again(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    generation = f.cell("engine-00000").generation
    silent(f, 1, 2)
    f.pass_time(5)
    f.clear()
    for order in (
        CancelRun(call_id="1"),
        DrainRun(call_id="2"),
        StopCell(call_id="3", cell="engine-00000", generation=generation),
        RestartCell(call_id="4", cell="engine-00000", generation=generation),
        StartCell(call_id="5", cell="engine-00000"),
    ):
        f.receive(b"op", order)
    answers = f.orders(Done, Failed)
    assert len(answers) == 5 and all("hears too few nodes to act" in answer.text for answer in answers)
    assert f.phases() == {"engine-00000": "ready"}
    f.resume(1)
    f.pass_time(1)
    assert not f.verdicts and f.core.drain is None
    f.clear()
    f.receive(b"op", CancelRun(call_id="6"))
    assert f.orders(Done, Failed) == [Done(call_id="6")] and f.verdicts[0].outcome == "cancelled"


def test_an_order_that_waits_for_a_window_waits_until_the_hub_may_act_again(fleet, pool):
    f = fleet(pool("engine"), pool("controller"), nodes=3)
    held = f.cell("engine-00000").generation
    f.receive(f.client("controller-00000-00000"), HoldCells(cells={"engine-00000": held}, seconds=10.0))
    f.receive(b"op", RestartCell(call_id="r", cell="engine-00000", generation=held))
    silent(f, 1, 2)
    f.pass_time(20)
    assert [order.call_id for order in f.core.deferred] == ["r"] and f.phases()["engine-00000"] == "ready"
    f.resume(1)
    f.pass_time(2)
    assert f.core.deferred == [] and f.cell("engine-00000").generation > held


def test_a_run_that_has_not_begun_acts(fleet, pool):
    f = fleet(pool("engine"), nodes=3, join=False)
    f.join(0)
    f.pass_time(20)
    assert f.core.standing.acts


def test_the_agent_beside_the_hub_hears_of_the_standing_each_second(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    f.pass_time(1)
    f.clear()
    f.pass_time(5)
    assert 4 <= len(f.standings) <= 6


def test_every_agent_gets_the_roster_of_those_that_answer_peers(fleet, pool):
    f = fleet(pool("engine"), nodes=3, join=False)
    f.join(0, peer_port=7000)
    f.join(1)
    f.join(2, peer_port=7002)
    f.clear()
    f.pass_time(1.5)
    rosters = f.orders(Roster)
    assert len(rosters) == 3 and rosters[0].hub_node == "node-00000"
    assert rosters[0].peers == [
        Peer(node="node-00000", host="host0", address="10.0.0.1", port=7000),
        Peer(node="node-00002", host="host2", address="10.0.0.3", port=7002),
    ]
    f.clear()
    f.pass_time(30)
    assert not f.orders(Roster)
