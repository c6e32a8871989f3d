"""Who is let in, who is silent, who comes back."""

import pytest

from miles_hpc.config.timing import Timing
from miles_hpc.hub.actions import Send, Tick, VerdictWritten
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    Goodbye,
    Heartbeat,
    Refused,
    ReservePorts,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerExited,
)

pytestmark = pytest.mark.unit


def test_a_hello_is_answered_with_the_node_the_epoch_and_the_heartbeat(fleet, pool):
    f = fleet(pool("engine"), nodes=2, join=False)
    assert f.join(1)[0] == Send(
        b"agent-1-i0", Welcome(node="node-00001", epoch=1, heartbeat=1.0, run_id="r", attempt=0)
    )


@pytest.mark.parametrize(
    ("info", "hello", "code", "named"),
    [
        ({"package_version": "1.0"}, {"package_version": "0.9"}, "version", ["0.9", "1.0"]),
        ({"digest": "a" * 64}, {"digest": "b" * 64}, "digest", ["a" * 12, "b" * 12]),
        ({}, {"node_index": -1}, "malformed", ["-1"]),
        ({}, {"address": ""}, "malformed", ["''"]),
    ],
)
def test_a_stranger_is_refused_by_name(fleet, pool, info, hello, code, named):
    f = fleet(pool("engine"), join=False, **info)
    ((refusal),) = [action.message for action in f.join(0, **hello)]
    assert isinstance(refusal, Refused) and refusal.code == code
    assert all(part in refusal.text for part in named)
    assert not f.core.nodes


def test_a_second_incarnation_is_refused_with_the_firsts_host_and_pid_until_that_is_suspect(fleet, pool):
    f = fleet(pool("engine"))
    old = f.agents[0]
    new = f.add_agent(0, incarnation="i1")
    f.clear()
    f.join(0)
    assert new.refused is not None and new.refused.code == "node_taken"
    assert "host0" in new.refused.text and "1000" in new.refused.text
    for _ in range(8):
        f.now += 0.5
        f.apply(Tick())
    f.join(0)
    f.settle()
    assert f.core.nodes["node-00000"].incarnation == "i1"
    assert f.phases() == {"engine-00000": "ready"} and f.cell("engine-00000").generation == Generation(1, 2)
    ((told),) = f.receive(old.peer, Heartbeat(seq=9))
    assert told.message.code == "unknown"


def test_the_same_incarnation_may_say_hello_again_on_a_new_connection(fleet, pool):
    f = fleet(pool("engine"))
    f.agents[0].peer = b"other-connection"
    f.clear()
    f.join(0)
    f.settle()
    assert f.phases() == {"engine-00000": "ready"} and f.cell("engine-00000").generation == Generation(1, 1)
    assert f.orders(ReservePorts, StartWorker, StopWorker) == []


def test_orders_that_a_broken_connection_swallowed_are_sent_again_after_the_hello(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2), join=False)
    f.join(0)
    first, second = f.reports
    f.reports.clear()
    f.agents[0].silent = True
    f.receive(*first)
    f.receive(*second)  # now the start orders go out, into the void
    f.agents[0].silent = False
    f.clear()
    f.join(0)
    assert len(f.orders(StartWorker)) == 2
    f.settle()
    assert f.phases() == {"engine-00000": "ready"}


def test_a_suspect_node_gets_no_new_work(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2)
    f.agents[1].silent = True
    f.pass_time(4)
    assert f.core.nodes["node-00001"].condition == "suspect"
    f.clear()
    f.die("engine-00000-00000")
    f.receive(b"agent-0-i0", Heartbeat(seq=2))
    assert {o.worker for o in f.orders(ReservePorts)} == {"engine-00000-00000"}
    assert f.places("engine")[0] == [("node-00000", ())]
    assert f.phases()["engine-00001"] == "ready", "suspicion alone ends nothing"


def test_a_node_silent_past_dead_loses_its_stateless_cells_at_once_and_their_siblings_are_stopped(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2, num_cpus_per_worker=4.0), pool("other", num_cells=2), nodes=2)
    assert {w.node for w in f.cell("engine-00000").workers} == {"node-00000", "node-00001"}
    f.agents[1].silent = True
    f.clear()
    f.pass_time(11)
    stops = [(o.worker, "silent" in o.reason) for o in f.orders(StopWorker)]
    assert ("engine-00000-00000", True) in stops
    assert set(f.phases().values()) == {"ready"}
    assert {w.node for cell in f.core.cells.values() for w in cell.workers} == {"node-00000"}
    assert not f.cell("engine-00000").deaths, "a lost node is not charged to the cell"


def test_a_stateful_cell_of_a_dead_node_waits_for_the_fence(fleet, pool):
    f = fleet(pool("keeper", state="stateful"), pool("engine"), nodes=2)
    assert f.places("keeper")[0][0][0] == "node-00001"
    f.agents[1].silent = True
    f.pass_time(40)
    assert f.phases()["keeper-00000"] == "stopping"
    f.pass_time(11)
    assert f.phases()["keeper-00000"] == "ready" and f.places("keeper") == [[("node-00000", ())]]


def test_a_stateful_cell_is_replaced_as_soon_as_its_agent_confirms_the_stop(fleet, pool):
    f = fleet(pool("keeper", state="stateful"), pool("engine"), nodes=2)
    f.agents[1].silent = True
    f.pass_time(12)
    f.agents[1].silent = False
    f.pass_time(1)
    assert f.phases()["keeper-00000"] == "ready" and f.cell("keeper-00000").generation == Generation(1, 2)


def test_a_dead_node_that_returns_is_told_to_stop_what_was_replaced(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=2), nodes=2, gpus=2)
    (place,) = f.places("engine")[0]
    assert place == ("node-00000", (0, 1))
    f.agents[0].silent = True
    f.pass_time(12)
    assert f.places("engine") == [[("node-00001", (0, 1))]]
    assert f.core.nodes["node-00000"].gpu_holders, "its GPUs stay occupied until the stop is confirmed"
    f.agents[0].silent = False
    f.clear()
    f.pass_time(1)
    assert f.orders(StopWorker) == [
        StopWorker(worker="engine-00000-00000", generation=Generation(1, 1), reason="superseded while silent")
    ]
    assert not f.core.nodes["node-00000"].gpu_holders and not f.core.nodes["node-00000"].strays
    assert f.cell("engine-00000").generation == Generation(1, 2) and f.phases() == {"engine-00000": "ready"}


def test_a_stalled_hub_judges_nobody_by_its_own_lag(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.now += 60.0
    f.apply(Tick())
    assert [node.condition for node in f.core.nodes.values()] == ["alive", "alive"]


def test_missing_nodes_are_named_when_the_join_time_is_over(fleet, pool):
    f = fleet(pool("engine"), nodes=3, join=False, timing=Timing(join=5.0))
    f.join(1)
    f.pass_time(6)
    (verdict,) = f.verdicts
    assert "1 of 3 nodes" in verdict.reason and "node-00000, node-00002" in verdict.reason


def test_a_node_that_leaves_gives_its_stateless_cells_to_the_others(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2)
    f.agents[1].table.clear()
    f.agents[1].left = True
    f.receive(f.agents[1].peer, Goodbye(reason="told to"))
    f.settle()
    assert f.phases() == {"engine-00000": "ready", "engine-00001": "ready"}
    assert {cell[0][0] for cell in f.places("engine")} == {"node-00000"} and not f.verdicts


def test_agents_that_were_told_to_leave_make_a_cancelled_run_not_a_failed_one(fleet, pool):
    f = fleet(pool("driver", restart="fail_run", state="stateful"))
    f.receive(
        f.agents[0].peer,
        WorkerExited(worker="driver-00000-00000", generation=Generation(1, 1), signal=15, cause="stopped"),
    )
    (verdict,) = f.verdicts
    assert verdict.outcome == "cancelled" and verdict.exit_code == 130


def test_the_last_agent_to_leave_ends_the_run(fleet, pool):
    f = fleet(pool("engine"))
    f.receive(f.agents[0].peer, Goodbye(reason="SIGTERM"))
    (verdict,) = f.verdicts
    assert verdict.outcome == "cancelled" and "SIGTERM" in verdict.reason


def test_a_connection_without_a_hello_is_asked_for_one(fleet, pool):
    f = fleet(pool("engine"))
    ((answer),) = f.receive(b"nobody", Heartbeat(seq=1))
    assert answer.message.code == "unknown"


@pytest.mark.parametrize(
    ("hosts", "named", "missed"),
    [((), "node-00001, node-00002;", ["node-00001", "node-00002"]),
     (("a", "b", "c"), "node-00001 (b), node-00002 (c);", ["b", "c"])],
)  # fmt: skip
def test_nodes_that_never_say_hello_are_named_and_count_as_missed(fleet, pool, hosts, named, missed):
    f = fleet(pool("engine"), nodes=3, join=False, hosts=hosts)
    f.join(0)
    f.pass_time(f.core.timing.join + 1)
    (verdict,) = f.verdicts
    assert verdict.outcome == "failed" and "1 of 3 nodes said hello within 60 s" in verdict.reason
    assert f"missing: {named}" in verdict.reason
    f.apply(VerdictWritten())
    f.settle()
    assert f.core.missed_hosts() == missed, "their tasks may stand still for ever: the site ends the step"
