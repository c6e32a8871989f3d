"""Workers that do not end: the hub says so, goes on without them where that is safe, and otherwise ends the run."""

import msgspec
import pytest

from miles_hpc.config.timing import Timing
from miles_hpc.hub.core import FENCE_SLACK_S
from miles_hpc.hub.healing import UNCOMMITTED
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Goodbye, ReservePorts, StopCell, StopWorker

pytestmark = pytest.mark.unit

UNIT = {"group": "training", "state": "stateful"}
WORKER = "engine-00000-00000"


def patience(f, grace=None):
    return (f.timing.stop_grace if grace is None else grace) + f.timing.fence + FENCE_SLACK_S


def told(f):
    return [note for note in f.notes if note.event == "worker_does_not_end"]


def home(f, cell="engine-00000"):
    return f.core.nodes[f.cell(cell).workers[0].node]


def stuck(f, cell="engine-00000"):
    """The agent of a cell with one worker; the rest of that worker hangs from now on."""
    agent = f.agents[int(home(f, cell).id[-5:])]
    f.hang(f"{cell}-00000")
    return agent


def test_a_worker_that_does_not_end_is_named_once_with_its_process_and_node(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    pid = f.cell("engine-00000").workers[0].pid
    agent = stuck(f)
    f.pass_time(patience(f) - 1)
    assert not told(f) and f.phases() == {"engine-00000": "stopping"}
    f.pass_time(2)
    (note,) = told(f)
    seconds = note.fields.pop("seconds")
    assert patience(f) < seconds < patience(f) + 2
    assert note.fields == {
        "worker": WORKER,
        "generation": "1-1",
        "pid": pid,
        "node": agent.node,
        "host": f"host{agent.index}",
    }
    f.pass_time(100)
    assert len(told(f)) == 1
    assert [note.event for note in f.notes].count("stray_worker") <= 1


def test_a_cell_without_state_goes_on_elsewhere_and_gets_its_place_back_when_the_worker_has_ended(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=1), nodes=2, gpus=1)
    agent = stuck(f)
    f.pass_time(patience(f) + 1)
    assert f.cell("engine-00000").generation == Generation(1, 2) and f.phases()["engine-00000"] == "ready"
    assert home(f).id != agent.node
    node = f.core.nodes[agent.node]
    assert node.gpu_holders == {0: (WORKER, Generation(1, 1))} and node.strays == {WORKER: Generation(1, 1)}
    f.end_at_last(WORKER)
    assert not node.gpu_holders and not node.strays
    f.die(WORKER)
    f.pass_time(2)
    assert f.phases()["engine-00000"] == "ready" and not f.verdicts


def test_one_that_its_agent_could_not_kill_either_costs_its_cell_one_restart(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.hang(WORKER, cause="probe_failed", text="no answer; it was killed, and has not ended yet")
    (ends,) = [note for note in f.notes if note.event == "cell_ends"]
    assert ends.fields["reason"].startswith(f"{WORKER} ends, probe_failed: no answer; it was killed")
    f.pass_time(patience(f) + 1)
    assert len(told(f)) == 1 and f.phases()["engine-00000"] == "ready"
    f.end_at_last(WORKER)
    f.pass_time(2)
    cell = f.cell("engine-00000")
    assert len(cell.deaths) == 1 and cell.generation == Generation(1, 2) and cell.published


def test_its_end_that_was_lost_with_the_connection_is_told_once_more_and_counts_once(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    agent = f.agents[int(home(f).id[-5:])]
    agent.stuck.add(WORKER)
    agent.table[WORKER] = msgspec.structs.replace(agent.table[WORKER], state="stopping")
    f.join(agent.index)
    assert f.phases() == {"engine-00000": "ready"}
    f.clear()
    for _ in range(2):
        f.hang(WORKER, cause="probe_failed", text="no answer")
    assert f.phases() == {"engine-00000": "stopping"} and len(f.cell("engine-00000").deaths) == 1
    assert [note.event for note in f.notes] == ["worker_exited", "cell_ends"]


def test_a_new_hub_takes_no_cell_for_running_whose_worker_hangs_in_its_end(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    agent = stuck(f)
    f.next_hub()
    for index in range(2):
        f.join(index)
    f.settle()
    f.pass_time(patience(f) + 2)
    (note,) = told(f)
    assert (note.fields["worker"], note.fields["node"]) == (WORKER, agent.node)
    assert home(f).id != agent.node and f.phases() == {"engine-00000": "ready"}


def test_its_gpu_is_given_to_nobody_meanwhile(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=1), pool("other", num_gpus_per_worker=1), nodes=2, gpus=2)
    agent = stuck(f)
    f.pass_time(patience(f) + 1)
    held = f.core.nodes[agent.node].gpu_holders
    assert [slot for slot, holder in held.items() if holder == (WORKER, Generation(1, 1))]
    assert home(f).id != agent.node
    taken = [(w.node, s) for cell in f.core.cells.values() for w in cell.workers for s in w.gpu_slots]
    stuck_at = [(agent.node, slot) for slot, holder in held.items() if holder == (WORKER, Generation(1, 1))]
    assert not set(taken) & set(stuck_at)


def test_on_the_only_node_the_run_drains_as_for_any_place_that_is_missing_and_says_why(fleet, pool):
    f = fleet(pool("engine"))
    stuck(f)
    f.pass_time(patience(f) + f.timing.replace_timeout - 2)
    assert not f.verdicts and f.phases() == {"engine-00000": "waiting"}
    f.pass_time(4)
    (verdict,) = f.verdicts
    assert verdict.outcome == "drained" and verdict.summary["requeue"]
    assert "left out: node-00000, where an older engine-00000 has not ended" in verdict.reason


def test_on_the_only_node_others_of_the_pool_do_its_work(fleet, pool):
    f = fleet(pool("engine", num_cells=2))
    stuck(f)
    f.pass_time(patience(f) + 2 * f.timing.replace_timeout, step=1.0)
    assert f.phases() == {"engine-00000": "waiting", "engine-00001": "ready"} and not f.verdicts
    f.end_at_last(WORKER)
    f.pass_time(2)
    assert set(f.phases().values()) == {"ready"}


def test_all_workers_of_a_cell_are_given_up_before_it_goes_on(fleet, pool):
    f = fleet(pool("engine", num_workers_per_cell=2, num_gpus_per_worker=1), nodes=2, gpus=2)
    agent = f.agents[int(home(f).id[-5:])]
    agent.stuck.add("engine-00000-00001")
    f.hang(WORKER)
    f.pass_time(patience(f) + 1)
    assert {note.fields["worker"] for note in told(f)} == {WORKER, "engine-00000-00001"}
    assert f.phases()["engine-00000"] == "ready" and home(f).id != agent.node
    assert len(f.core.nodes[agent.node].gpu_holders) == 2


@pytest.mark.parametrize("more", [{}, UNIT | {"restart": "restart"}])
def test_a_stateful_cell_is_started_nowhere_beside_it_and_the_run_drains_after_replace_timeout(fleet, pool, more):
    f = fleet(pool("engine", **{"state": "stateful", **more}), nodes=2)
    agent = stuck(f)
    f.clear()
    f.pass_time(f.timing.replace_timeout - 1)
    assert len(told(f)) == 1 and f.phases() == {"engine-00000": "stopping"} and not f.verdicts
    f.pass_time(3)
    (verdict,) = f.verdicts
    assert (verdict.outcome, verdict.exit_code, verdict.summary["requeue"]) == ("drained", 75, True)
    assert f"{WORKER} (pid 101) on {agent.node} (host{agent.index}) has not ended for 12" in verdict.reason
    assert "a second engine-00000 may not run beside it" in verdict.reason and UNCOMMITTED in verdict.reason
    assert not f.orders(ReservePorts)


def test_a_stateful_cell_whose_worker_ends_in_time_is_started_again(fleet, pool):
    f = fleet(pool("engine", state="stateful"))
    stuck(f)
    f.pass_time(f.timing.replace_timeout - 1)
    f.end_at_last(WORKER)
    f.pass_time(2)
    assert f.phases() == {"engine-00000": "ready"} and f.core.drain is None
    f.pass_time(f.timing.replace_timeout)
    assert f.core.drain is None and not f.core.leftovers


def test_a_driver_commits_before_the_run_ends_for_another_cell(fleet, pool):
    f = fleet(pool("controller", state="stateful"), pool("driver", category="driver", state="stateful"))
    stuck(f, "controller-00000")
    f.pass_time(f.timing.replace_timeout + 2)
    assert f.core.drain is not None and "controller-00000-00000" in f.core.drain.reason and not f.verdicts
    f.pass_time(f.timing.drain + 1)
    assert f.verdicts[0].outcome == "drained"


def test_a_stateful_pool_gets_on_without_one_of_its_cells(fleet, pool):
    f = fleet(pool("store", num_cells=2, state="stateful"))
    stuck(f, "store-00000")
    f.pass_time(2 * f.timing.replace_timeout)
    assert f.core.drain is None and f.phases() == {"store-00000": "stopping", "store-00001": "ready"}


def test_the_stops_own_grace_counts_first(fleet, pool):
    f = fleet(pool("engine", stop_grace=40.0), nodes=2)
    stuck(f)
    f.pass_time(patience(f, 40.0) - 1)
    assert not told(f) and f.phases()["engine-00000"] == "stopping"
    f.pass_time(2)
    assert told(f) and f.phases()["engine-00000"] == "ready"


def test_an_operators_stop_is_over_when_it_is_given_up(fleet, pool):
    f = fleet(pool("engine", num_cells=2))
    agent = f.agents[0]
    agent.stuck.add(WORKER)
    f.receive(b"op", StopCell(call_id="1", cell="engine-00000", generation=Generation(1, 1)))
    f.settle()
    f.pass_time(patience(f) + 1)
    assert len(told(f)) == 1 and f.phases()["engine-00000"] == "stopped"
    f.pass_time(2 * f.timing.replace_timeout)
    assert not f.verdicts and f.core.drain is None


def test_a_stateful_cell_that_nobody_wants_ends_no_run(fleet, pool):
    f = fleet(pool("store", state="stateful"), pool("engine"))
    f.agents[0].stuck.add("store-00000-00000")
    f.receive(b"op", StopCell(call_id="1", cell="store-00000", generation=Generation(1, 1)))
    f.settle()
    f.pass_time(2 * f.timing.replace_timeout)
    assert len(told(f)) == 1 and f.phases()["store-00000"] == "stopping" and f.core.drain is None


def test_a_hub_that_takes_over_waits_as_long_for_a_stray_of_a_stateful_cell(fleet, pool):
    f = fleet(pool("engine", state="stateful"), nodes=2)
    stuck(f)
    f.next_hub()
    f.join(0)
    f.join(1)
    f.pass_time(f.timing.replace_timeout - 1)
    assert f.phases() == {"engine-00000": "waiting"} and len(told(f)) == 1
    assert told(f)[0].fields["pid"] == 101
    f.pass_time(3)
    assert f.verdicts[0].outcome == "drained" and f"{WORKER} (pid 101)" in f.verdicts[0].reason


def test_a_node_that_is_silent_is_judged_by_its_silence(fleet, pool):
    f = fleet(pool("engine", state="stateful"), nodes=2)
    agent = stuck(f)
    f.pass_time(2)
    agent.silent = True
    f.pass_time(f.timing.fence + 8)
    assert not told(f) and f.phases() == {"engine-00000": "ready"}
    f.pass_time(f.timing.replace_timeout, step=1.0)
    assert not told(f) and f.core.drain is None


def test_a_node_that_leaves_takes_it_along(fleet, pool):
    f = fleet(pool("engine", state="stateful"), nodes=2)
    agent = stuck(f)
    f.receive(agent.peer, Goodbye(reason="told to"))
    agent.silent = True
    f.pass_time(2)
    assert f.phases() == {"engine-00000": "ready"} and not f.core.leftovers


def test_a_hub_that_stood_still_does_not_count_that_time(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    stuck(f)
    f.pass_time(5)
    f.now += patience(f)
    f.pass_time(patience(f) - 7)
    assert not told(f)
    f.pass_time(4)
    assert told(f)


@pytest.mark.parametrize("whose", ["the_others", "its_own"])
def test_time_of_a_partition_does_not_count(fleet, pool, whose):
    f = fleet(pool("engine", state="stateful"), nodes=3, timing=Timing(replace_timeout=60.0))
    agent = stuck(f)
    f.pass_time(patience(f) + 2)
    others = [other for other in f.agents if other is not agent]
    cut_off = others if whose == "the_others" else [agent, others[0]]
    for other in cut_off:
        other.silent = True
    f.pass_time(80)
    assert not f.core.standing.acts and not f.core.leftovers
    for other in cut_off:
        f.resume(other.index)
    f.pass_time(50)
    assert f.core.standing.acts and f.core.drain is None and not f.verdicts
    f.pass_time(15)
    assert f.verdicts[0].outcome == "drained"


def test_time_in_which_its_node_is_suspect_does_not_count(fleet, pool):
    f = fleet(pool("engine"), nodes=3)
    agent = stuck(f)
    f.pass_time(patience(f) - 6)
    agent.silent = True
    f.pass_time(f.timing.suspect + 2)
    assert f.core.nodes[agent.node].condition == "suspect" and not f.core.leftovers
    f.resume(agent.index)
    f.pass_time(10)
    assert not told(f)
    f.pass_time(patience(f))
    assert len(told(f)) == 1


def test_the_order_to_stop_is_repeated_to_an_agent_that_still_lists_it(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    stuck(f)
    f.pass_time(patience(f) + 1)
    f.clear()
    f.pass_time(f.timing.anti_entropy + 1)
    assert {order.worker for order in f.orders(StopWorker)} == {WORKER}
