"""A hub of the next epoch: what runs is adopted as it is, the rest is stopped or started anew."""

import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.actions import Send, Tick, VerdictWritten
from miles_hpc.hub.journal import Journal, restore, take
from miles_hpc.hub.site import SiteSeen
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CancelRun,
    CellsReply,
    ClientHello,
    ClientWelcome,
    Done,
    Draining,
    DrainRun,
    Failed,
    GetCells,
    Goodbye,
    HoldCells,
    PoolAddrs,
    Progress,
    ReservePorts,
    RestartCell,
    Shutdown,
    StartCell,
    StartWorker,
    StopCell,
    StopWorker,
    Superseded,
    Welcome,
    WorkerExited,
    WorkerState,
)

pytestmark = pytest.mark.unit

UNIT = {"group": "training", "state": "stateful"}


def whole_run(fleet, pool, nodes=2, **more):
    made = fleet(
        pool("engine", num_cells=2, num_gpus_per_worker=2),
        pool("trainer", category="trainer", num_workers_per_cell=2, **UNIT),
        pool("driver", category="driver", **UNIT),
        nodes=nodes,
        gpus=4,
        **more,
    )
    assert set(made.phases().values()) == {"ready"}
    return made


def snapshot(f):
    return {
        cell.id: (cell.generation, [(w.id, w.node, w.gpu_slots, w.ports, w.pid) for w in cell.workers])
        for cell in f.core.cells.values()
    }


def test_everything_that_runs_is_adopted_with_its_generation_place_ports_and_pids(fleet, pool):
    f = whole_run(fleet, pool)
    before = snapshot(f)
    f.next_hub()
    f.join(0)
    f.pass_time(1)
    assert not f.orders(ReservePorts, StartWorker, StopWorker), "one table is still missing"
    f.join(1)
    f.pass_time(30)
    assert snapshot(f) == before and set(f.phases().values()) == {"ready"}
    assert f.orders(Welcome)[0].epoch == 2
    assert not f.orders(ReservePorts, StartWorker, StopWorker) and not f.verdicts


def test_gpus_of_adopted_workers_are_taken(fleet, pool):
    f = whole_run(fleet, pool)
    f.next_hub()
    f.join(0)
    f.join(1)
    f.apply(Tick())
    held = {(node.id, slot) for node in f.core.nodes.values() for slot in node.gpu_holders}
    assert held == {(node, slot) for cell in f.core.pools["engine"] for w in cell.workers for node, slot in [
        (w.node, s) for s in w.gpu_slots]} and len(held) == 4  # fmt: skip


def test_a_program_waits_for_the_tables_and_is_then_welcome(fleet, pool):
    f = whole_run(fleet, pool)
    f.next_hub()
    peer = f.client("driver-00000-00000", Generation(1, 1))
    f.join(0)
    assert not [a for a in f.sent if isinstance(a, Send) and a.peer == peer]
    f.join(1)
    f.apply(Tick())
    answers = [a.message for a in f.sent if isinstance(a, Send) and a.peer == peer]
    assert answers[0] == ClientWelcome(epoch=2, run_id="r", attempt=0)
    assert isinstance(answers[1], PoolAddrs) and len(answers[1].pools["engine"]) == 2
    f.receive(peer, Progress(step=7, weight_version=8))
    assert f.core.step == 7


def test_a_program_of_a_cell_that_went_on_is_superseded(fleet, pool):
    f = fleet(pool("engine"))
    f.die("engine-00000-00000")
    f.pass_time(2)
    f.next_hub()
    f.receive(b"old", ClientHello(worker="engine-00000-00000", generation=Generation(1, 1), pid=1))
    f.join(0)
    f.apply(Tick())
    assert [type(a.message) for a in f.sent if isinstance(a, Send) and a.peer == b"old"] == [Superseded]


def test_a_worker_that_died_with_nobody_to_tell_is_started_anew(fleet, pool):
    f = whole_run(fleet, pool)
    f.next_hub()
    f.join(0)
    agent = next(agent for agent in f.agents if "engine-00001-00000" in agent.table)
    del agent.table["engine-00001-00000"]
    f.join(1)
    f.join(0)
    f.pass_time(1)
    assert f.cell("engine-00001").generation == Generation(2, 1)
    assert f.cell("engine-00000").generation == Generation(1, 1)
    assert set(f.phases().values()) == {"ready"}


def test_a_death_while_the_tables_come_in_is_not_lost(fleet, pool):
    f = whole_run(fleet, pool)
    f.next_hub()
    agent = next(agent for agent in f.agents if "engine-00000-00000" in agent.table)
    f.join(agent.index)
    f.receive(agent.peer, WorkerExited(worker="engine-00000-00000", generation=Generation(1, 1), signal=9))
    del agent.table["engine-00000-00000"]
    f.join(1 - agent.index)
    f.pass_time(1)
    assert f.cell("engine-00000").generation == Generation(2, 1) and set(f.phases().values()) == {"ready"}


def moved_while_its_node_was_silent(fleet, pool):
    """An engine's node fell silent and was replaced by the other, which has ports for it; then the hub ends."""
    f = fleet(pool("engine"), nodes=2)
    f.agents[0].silent = True
    f.pass_time(f.timing.dead)
    while f.cell("engine-00000").generation == Generation(1, 1):
        f.now += 0.5
        f.apply(Tick())
    peer, reserved = f.reports.pop()
    assert (peer, reserved.generation) == (f.agents[1].peer, Generation(1, 2))
    f.receive(peer, reserved)
    assert f.state.book["engine"][0].generation == Generation(1, 2)
    f.agents[0].silent = False
    return f


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_older_generation_is_not_adopted_where_a_newer_one_was_only_reserved(fleet, pool, order):
    f = moved_while_its_node_was_silent(fleet, pool)
    row = f.agents[1].table["engine-00000-00000"]
    f.agents[1].table["engine-00000-00000"] = WorkerState(
        worker=row.worker, generation=row.generation, state="reserved", ports=row.ports
    )
    f.next_hub(journal=False)
    for index in order:
        f.join(index)
    f.apply(Tick())
    stopped = {(order.worker, order.generation) for order in f.orders(StopWorker)}
    assert stopped == {("engine-00000-00000", Generation(1, n)) for n in (1, 2)}
    f.pass_time(2)
    assert f.cell("engine-00000").generation == Generation(2, 1) and f.phases()["engine-00000"] == "ready"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_generations_that_both_run_the_newer_is_adopted(fleet, pool, order):
    f = moved_while_its_node_was_silent(fleet, pool)
    assert f.agents[1].table["engine-00000-00000"].pid
    f.next_hub(journal=False)
    for index in order:
        f.join(index)
    f.apply(Tick())
    assert [(order.worker, order.generation) for order in f.orders(StopWorker)] == [
        ("engine-00000-00000", Generation(1, 1))
    ]
    assert f.cell("engine-00000").generation == Generation(1, 2)


@pytest.mark.parametrize("journal", [True, False])
def test_a_generation_that_the_journal_knows_to_be_superseded_is_not_adopted(fleet, pool, journal):
    """Without one it is: nobody who is heard knows better."""
    f = moved_while_its_node_was_silent(fleet, pool)
    f.agents[1].silent = True
    f.next_hub(journal)
    f.join(0)
    f.pass_time(f.timing.dead + 2)
    assert f.cell("engine-00000").generation == (Generation(2, 1) if journal else Generation(1, 1))
    assert f.phases()["engine-00000"] == "ready"


@pytest.mark.parametrize("silent_s", [1, 60], ids=["gone at once", "heard nobody"])
def test_what_the_journal_knows_of_generations_outlives_a_hub_that_started_none(fleet, pool, silent_s):
    f = moved_while_its_node_was_silent(fleet, pool)
    for agent in f.agents:
        agent.silent = True
    f.next_hub()
    f.pass_time(silent_s)
    assert f.core.recovering and f.phases() == {"engine-00000": "waiting"}
    f.next_hub()
    f.agents[0].silent = False
    f.join(0)
    f.pass_time(f.timing.dead + 2)
    assert f.cell("engine-00000").generation == Generation(3, 1) and f.phases()["engine-00000"] == "ready"


def test_half_a_cell_is_stopped_and_its_group_starts_anew(fleet, pool):
    f = whole_run(fleet, pool)
    f.next_hub()
    for agent in f.agents:
        agent.table.pop("trainer-00000-00001", None)
    f.join(0)
    f.join(1)
    f.apply(Tick())
    assert {order.worker for order in f.orders(StopWorker)} == {"trainer-00000-00000", "driver-00000-00000"}
    f.pass_time(2)
    assert f.cell("trainer-00000").generation.epoch == f.cell("driver-00000").generation.epoch == 2
    assert f.cell("engine-00000").generation == Generation(1, 1) and not f.verdicts


def test_a_missing_node_is_waited_for_until_it_counts_as_dead(fleet, pool):
    f = fleet(pool("engine", num_cells=2), nodes=2)
    lost = f.agents[1]
    lost.silent = True
    f.next_hub()
    f.join(0)
    f.pass_time(f.core.timing.dead - 1)
    assert not f.orders(ReservePorts, StartWorker)
    f.pass_time(3)
    assert {worker.node for cell in f.core.pools["engine"] for worker in cell.workers} == {"node-00000"}
    assert set(f.phases().values()) == {"ready"}


def test_a_hub_that_hears_less_than_half_of_the_run_ends_nothing(fleet, pool):
    f = fleet(pool("engine", num_cells=3), pool("driver", category="driver", state="stateful"), nodes=3)
    before = snapshot(f)
    f.agents[0].silent = f.agents[2].silent = True
    f.next_hub()
    f.join(1)
    f.pass_time(f.core.timing.fence + 10)
    assert not f.core.standing.acts and not f.orders(StopWorker, ReservePorts, StartWorker)
    # Its nodes come back one after the other, and what ran on the last of them is no more lost than the rest.
    for index in (2, 0):
        f.agents[index].silent = False
        f.join(index)
        f.pass_time(f.core.timing.dead - 1)
    assert f.core.standing.acts and not f.core.recovering
    assert snapshot(f) == before and set(f.phases().values()) == {"ready"}


def test_nodes_that_left_or_are_down_are_not_missed_by_a_new_hub(fleet, pool):
    f = fleet(pool("engine", num_cells=5), nodes=5, hosts=tuple(f"host{index}" for index in range(5)))
    f.receive(f.agents[4].peer, Goodbye(reason="enough"))
    f.agents[4].left = True
    f.agents[2].silent = f.agents[3].silent = True
    down = SiteSeen(down_hosts=frozenset({"host2", "host3.cluster"}))
    f.pass_time(f.timing.dead + 1)
    f.apply(down)
    f.pass_time(1)
    f.lease = False
    for _ in range(2):
        f.next_hub()
        for index in (0, 1):
            f.join(index)
        f.pass_time(f.timing.dead + 2)
        assert not f.core.standing.acts and f.core.recovering, "two of the four that have not left"
        assert {"host2", "host3"} <= set(f.core.lost_hosts())
    f.apply(down)
    f.pass_time(f.timing.dead + 2)
    assert f.core.standing.acts and not f.core.recovering
    assert {worker.node for cell in f.core.pools["engine"] for worker in cell.workers} == {"node-00000", "node-00001"}


def test_stateful_cells_of_a_missing_node_wait_for_its_fence(fleet, pool):
    f = fleet(pool("engine"), pool("driver", category="driver", state="stateful", avoid_hub_node=True), nodes=2)
    assert f.cell("driver-00000").workers[0].node == "node-00001"
    f.agents[1].silent = True
    f.next_hub()
    f.join(0)
    f.pass_time(f.core.timing.fence + 4)
    assert f.phases()["driver-00000"] == "waiting"
    f.pass_time(3)
    assert f.phases()["driver-00000"] == "ready" and f.cell("driver-00000").workers[0].node == "node-00000"


@pytest.mark.parametrize("orders", [("restart",), ("stop", "start")])
def test_an_operator_does_not_hurry_a_cell_that_waits_for_the_fence_of_a_missing_node(fleet, pool, orders):
    f = fleet(pool("engine"), pool("driver", category="driver", state="stateful", avoid_hub_node=True), nodes=2)
    f.agents[1].silent = True
    f.next_hub()
    f.join(0)
    f.pass_time(f.timing.dead + 2)
    generation = f.cell("driver-00000").generation
    for order in orders:
        f.receive(
            b"op",
            {
                "restart": RestartCell(call_id="r", cell="driver-00000", generation=generation),
                "stop": StopCell(call_id="s", cell="driver-00000", generation=generation),
                "start": StartCell(call_id="t", cell="driver-00000"),
            }[order],
        )
    assert [type(answer) for answer in f.orders(Done, Failed)] == [Done] * len(orders)
    f.pass_time(f.timing.fence - f.timing.dead)
    assert f.phases()["driver-00000"] == "waiting"
    assert "driver-00000-00000" in f.agents[1].table
    f.pass_time(6)
    assert f.phases()["driver-00000"] == "ready"


def test_the_death_of_a_part_does_not_hurry_another_that_waits_for_the_fence_of_a_missing_node(fleet, pool):
    f = fleet(pool("helper", group="g"), pool("driver", state="stateful", group="g", avoid_hub_node=True), nodes=2)
    f.agents[1].silent = True
    f.next_hub()
    f.join(0)
    f.pass_time(f.timing.dead + 2)
    assert f.phases() == {"helper-00000": "ready", "driver-00000": "waiting"}
    f.die("helper-00000-00000")
    f.pass_time(1)
    assert f.phases()["driver-00000"] == "waiting"
    f.pass_time(f.timing.fence)
    assert f.phases()["driver-00000"] == "ready"


def test_a_node_that_comes_late_stops_what_was_replaced_and_frees_what_was_held(fleet, pool):
    f = fleet(pool("engine", num_cells=2), pool("driver", state="stateful", avoid_hub_node=True), nodes=2)
    f.agents[1].silent = True
    f.next_hub()
    f.join(0)
    f.pass_time(20)
    assert f.phases()["driver-00000"] == "waiting"
    f.clear()
    f.agents[1].silent = False
    f.join(1)
    f.settle()
    assert {order.worker for order in f.orders(StopWorker)} >= {"driver-00000-00000"}
    f.pass_time(2)
    assert set(f.phases().values()) == {"ready"}
    running = [row for agent in f.agents for row in agent.table]
    assert len(running) == len(set(running)) == 3


def beat(f, index, seconds):
    """An agent whose workers take their time to end: it is heard, and lists them, while its orders wait."""
    for _ in range(int(seconds)):
        f.pass_time(1)
        f.table(index)
        f.settle()


def late_with_a_stateful_worker(fleet, pool, **more):
    f = fleet(pool("engine"), pool("driver", state="stateful", avoid_hub_node=True, **more), nodes=2)
    assert f.cell("driver-00000").workers[0].node == "node-00001"
    f.agents[1].silent = True
    f.next_hub()
    f.join(0)
    f.pass_time(f.timing.dead + 2)
    f.join(1)
    f.settle()
    return f


@pytest.mark.parametrize("more", [{}, {"group": "training"}])
def test_a_stateful_cell_waits_until_its_worker_on_a_node_that_comes_late_has_ended(fleet, pool, more):
    f = late_with_a_stateful_worker(fleet, pool, **more)
    beat(f, 1, 2 * f.timing.fence)
    assert f.phases()["driver-00000"] == "waiting" and "driver-00000-00000" in f.agents[1].table
    f.resume(1)
    f.pass_time(2)
    assert f.phases()["driver-00000"] == "ready" and not f.verdicts


def test_a_stateful_cell_does_not_wait_for_a_worker_that_is_fenced(fleet, pool):
    f = late_with_a_stateful_worker(fleet, pool)
    f.pass_time(f.timing.fence)
    assert f.phases()["driver-00000"] == "waiting"
    f.pass_time(6)
    assert f.phases()["driver-00000"] == "ready" and f.cell("driver-00000").workers[0].node == "node-00000"


def test_a_stateful_cell_does_not_wait_for_a_worker_on_a_node_that_left(fleet, pool):
    f = late_with_a_stateful_worker(fleet, pool)
    f.pass_time(1)
    assert f.phases()["driver-00000"] == "waiting"
    f.receive(f.agents[1].peer, Goodbye(reason="told to"))
    f.pass_time(1)
    assert f.phases()["driver-00000"] == "ready"


def test_a_stateful_cell_does_not_wait_for_a_worker_on_a_node_that_is_down(fleet, pool):
    f = late_with_a_stateful_worker(fleet, pool)
    f.pass_time(f.timing.dead + 2)
    assert f.phases()["driver-00000"] == "waiting"
    f.apply(SiteSeen(down_hosts=frozenset({"host1"})))
    f.pass_time(1)
    assert f.phases()["driver-00000"] == "ready"


def test_a_stateful_cell_waits_no_longer_than_the_fence_for_a_node_that_left_while_the_tables_came_in(fleet, pool):
    f = fleet(pool("driver", state="stateful", avoid_hub_node=True), nodes=2)
    f.next_hub()
    f.join(1)
    f.receive(f.agents[1].peer, Goodbye(reason="told to"))
    f.agents[1].silent = True
    f.join(0)
    f.pass_time(f.timing.fence + 7)
    assert f.phases()["driver-00000"] == "ready"


def test_a_stateful_cell_whose_worker_was_ending_when_the_hub_took_over_waits_for_what_is_left_of_it(fleet, pool):
    f = fleet(pool("driver", state="stateful", avoid_hub_node=True), nodes=2)
    f.next_hub()
    f.join(1)
    ended = WorkerExited(worker="driver-00000-00000", generation=Generation(1, 1), exit_code=1, gone=False)
    f.receive(f.agents[1].peer, ended)
    f.agents[1].silent = True
    f.join(0)
    beat(f, 1, 20)
    assert f.phases()["driver-00000"] == "waiting"
    f.resume(1)
    f.pass_time(2)
    assert f.phases()["driver-00000"] == "ready"


def test_gpus_of_workers_that_were_ending_when_the_hub_took_over_are_given_to_nobody_before_they_are_gone(fleet, pool):
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=1), nodes=2, gpus=1)
    f.next_hub()
    for agent in f.agents:
        f.join(agent.index)
        (row,) = agent.table.values()
        f.receive(agent.peer, WorkerExited(worker=row.worker, generation=row.generation, exit_code=1, gone=False))
        agent.silent = True
    f.pass_time(2)
    assert set(f.phases().values()) == {"waiting"}
    f.resume(0)
    f.resume(1)
    f.pass_time(12)
    assert set(f.phases().values()) == {"ready"}


def test_gpus_of_a_worker_that_was_replaced_are_taken_until_it_is_gone(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=1), nodes=2, gpus=1)
    f.agents[0].silent = True
    f.next_hub()
    f.join(1)
    f.pass_time(f.timing.dead + 2)
    assert f.cell("engine-00000").workers[0].node == "node-00001"
    f.join(0)
    node = f.core.nodes["node-00000"]
    assert node.gpu_holders == {0: ("engine-00000-00000", Generation(1, 1))}
    f.resume(0)
    f.settle()
    assert not node.gpu_holders and not node.strays


def test_an_agent_that_was_started_anew_has_an_empty_table_and_gets_everything_again(fleet, pool):
    f = whole_run(fleet, pool, nodes=1)
    f.next_hub()
    f.add_agent(0, gpus=4, incarnation="i1")
    f.join(0)
    f.pass_time(2)
    assert {cell.generation.epoch for cell in f.core.cells.values()} == {2}
    assert set(f.phases().values()) == {"ready"}


def test_a_hub_of_the_third_epoch_adopts_what_two_hubs_started(fleet, pool):
    f = whole_run(fleet, pool)
    f.next_hub()
    f.join(0)
    f.join(1)
    f.pass_time(1)
    f.die("engine-00000-00000")
    f.pass_time(2)
    before = snapshot(f)
    assert before["engine-00000"][0] == Generation(2, 2)
    f.next_hub()
    f.join(1)
    f.join(0)
    f.pass_time(1)
    assert snapshot(f) == before


def test_budgets_counts_and_an_operators_stop_outlive_the_hub(fleet, pool):
    f = fleet(pool("engine", num_cells=2), heal=HealConfig(budget=2, backoff_s=0.0))
    f.die("engine-00000-00000")
    f.pass_time(1)
    f.die("engine-00000-00000")
    f.pass_time(1)
    f.core.cells["engine-00001"].wanted = False
    f.die("engine-00001-00000")
    assert f.phases()["engine-00001"] == "stopped"
    f.next_hub()
    f.join(0)
    f.pass_time(1)
    assert f.phases() == {"engine-00000": "ready", "engine-00001": "stopped"}
    assert f.core.healed() == 2
    f.die("engine-00000-00000")
    assert f.verdicts[0].outcome == "failed" and "3 times" in f.verdicts[0].reason


def test_a_run_that_has_long_begun_does_not_miss_its_nodes_before_they_said_hello_to_a_new_hub(fleet, pool):
    f = whole_run(fleet, pool)
    f.pass_time(600)  # longer than timing.join
    f.next_hub()
    f.pass_time(1)
    f.join(0)
    f.pass_time(1)
    f.join(1)
    f.pass_time(30)
    assert not f.verdicts and f.core.held_decision is None
    assert set(f.phases().values()) == {"ready"}


def test_without_a_journal_the_run_goes_on_all_the_same(fleet, pool):
    f = whole_run(fleet, pool)
    before = snapshot(f)
    f.next_hub(journal=False)
    f.join(0)
    f.join(1)
    f.pass_time(1)
    assert snapshot(f) == before and not f.verdicts


def test_a_drain_outlives_the_hub(fleet, pool):
    f = fleet(pool("driver", category="driver"))
    f.receive(b"op", DrainRun(call_id="1", reason="walltime", deadline_s=30.0))
    f.next_hub()
    f.join(0)
    f.apply(Tick())
    peer = f.client("driver-00000-00000")
    (told,) = [a.message for a in f.sent if isinstance(a, Send) and a.peer == peer and isinstance(a.message, Draining)]
    assert told == Draining(reason="walltime", deadline_s=30.0)


def test_a_hub_that_finds_its_attempts_verdict_only_sends_the_agents_away(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.next_hub()
    f.state.take_over(None, "finished", 0.0)
    f.apply(Tick())
    assert not f.leaves, "agents that do not know yet are waited for"
    f.join(0)
    f.join(1)
    assert f.orders(Shutdown) == [Shutdown(reason="finished", exit_code=0)] * 2
    f.settle()
    assert f.leaves == 1 and not f.verdicts and not f.orders(ReservePorts, StopWorker)


def test_a_decision_outlives_the_hub_that_could_not_write_its_verdict(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.receive(b"op", CancelRun(call_id="1", reason="enough"))
    assert f.verdicts and not f.orders(Shutdown)
    f.next_hub()
    f.apply(Tick())
    (again,) = f.verdicts
    assert (again.outcome, again.reason) == ("cancelled", "enough")
    f.apply(VerdictWritten())
    assert not f.leaves, "agents that do not know yet are waited for"
    f.join(0)
    f.settle()
    assert not f.leaves, "the other one, too"
    f.join(1)
    f.settle()
    assert f.leaves == 1 and f.orders(Shutdown) == [Shutdown(reason="cancelled", exit_code=130)] * 2


def test_a_node_that_does_not_come_back_holds_the_end_up_for_a_moment_only(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.next_hub()
    f.state.take_over(None, "finished", 0.0)
    f.join(0)
    f.settle()
    f.pass_time(f.timing.dead - 1)
    assert not f.leaves
    f.pass_time(2)
    assert f.leaves == 1


def test_an_order_that_waits_for_a_window_outlives_the_hub(fleet, pool):
    f = fleet(pool("engine"), pool("controller"))
    peer = f.client("controller-00000-00000")
    held = f.cell("engine-00000").generation
    f.receive(peer, HoldCells(cells={"engine-00000": held}, seconds=30.0))
    f.receive(b"op", RestartCell(call_id="r", cell="engine-00000", generation=held))
    f.next_hub()
    f.apply(Tick())
    assert [order.call_id for order in f.core.deferred] == ["r"], "until it is known what runs"
    f.join(0)
    f.pass_time(1)
    assert f.cell("engine-00000").generation > held and f.phases()["engine-00000"] == "ready"


def test_an_operator_may_ask_while_the_tables_come_in(fleet, pool):
    f = fleet(pool("engine"))
    f.next_hub()
    f.receive(b"op", GetCells(call_id="1"))
    assert f.orders(CellsReply)[0].cells[0].state == "waiting"


def test_the_journal_survives_a_wall_clock_that_jumps_back(fleet, pool):
    f = fleet(pool("engine"))
    f.die("engine-00000-00000")
    left = take(f.core, wall=5000.0)
    restore(f.core, left, wall=100.0)
    assert f.core.started_at <= f.core.now and all(d <= f.core.now for d in f.core.cells["engine-00000"].deaths)
    assert isinstance(left, Journal) and left.starts == {"engine-00000": 2}
