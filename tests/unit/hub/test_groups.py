"""The training incarnation: driver, executor and trainer end and start as one."""

import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.actions import Tick
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    DrainRequest,
    FinishRun,
    Progress,
    ReservePorts,
    StartWorker,
    StopWorker,
    Superseded,
    WorkerExited,
)

pytestmark = pytest.mark.unit

PARTS = ("driver-00000", "executor-00000", "trainer-00000")


def training_run(fleet, pool, nodes=2, **more):
    unit = {"group": "training", "state": "stateful"}
    made = fleet(
        pool("engine"),
        pool("executor", category="executor", **unit),
        pool("trainer", category="trainer", num_workers_per_cell=2, **unit),
        pool("driver", category="driver", **unit),
        nodes=nodes,
        **more,
    )
    assert set(made.phases().values()) == {"ready"}
    return made


def generations(f):
    return {part: f.cell(part).generation.n for part in PARTS}


@pytest.mark.parametrize("victim", ["driver-00000-00000", "executor-00000-00000", "trainer-00000-00001"])
def test_any_death_in_the_group_starts_all_of_it_anew_and_nothing_else(fleet, pool, victim):
    f = training_run(fleet, pool)
    f.clear()
    f.die(victim, signal=9, exit_code=None)
    f.pass_time(1)
    assert generations(f) == dict.fromkeys(PARTS, 2) and set(f.phases().values()) == {"ready"}
    assert {order.worker for order in f.orders(StopWorker)} == {
        "driver-00000-00000", "executor-00000-00000", "trainer-00000-00000", "trainer-00000-00001"
    } - {victim}  # fmt: skip
    assert f.cell("engine-00000").generation == Generation(1, 1) and not f.verdicts


def test_no_part_starts_before_all_of_the_last_incarnation_is_gone(fleet, pool):
    f = training_run(fleet, pool)
    slow = next(agent for agent in f.agents if "trainer-00000-00000" in agent.table)
    slow.silent = True
    f.clear()
    f.die("executor-00000-00000")
    f.pass_time(2)
    assert not f.orders(ReservePorts) and f.phases()["trainer-00000"] == "stopping"
    f.resume(slow.index)
    f.settle()
    f.pass_time(1)
    assert generations(f) == dict.fromkeys(PARTS, 2) and set(f.phases().values()) == {"ready"}


def test_the_group_has_one_budget(fleet, pool):
    f = training_run(fleet, pool, heal=HealConfig(budget=2, backoff_s=0.0))
    for victim in ("driver-00000-00000", "executor-00000-00000", "trainer-00000-00001"):
        f.die(victim)
        f.pass_time(1)
    (verdict,) = f.verdicts
    assert verdict.outcome == "failed" and "group training ended 3 times" in verdict.reason
    assert "trainer-00000-00001" in verdict.reason


def test_a_failure_that_a_death_explains_is_an_incarnation_more(fleet, pool):
    f = training_run(fleet, pool)
    driver = f.client("driver-00000-00000")
    f.receive(driver, FinishRun(outcome="failed", reason="a rank did not answer"))
    f.die("driver-00000-00000", settle=False)
    f.die("trainer-00000-00001", signal=9, exit_code=None)
    f.pass_time(5)
    assert not f.verdicts and generations(f) == dict.fromkeys(PARTS, 2)
    assert set(f.phases().values()) == {"ready"}


def test_a_failure_that_nothing_explains_ends_the_run_with_the_drivers_reason(fleet, pool):
    f = training_run(fleet, pool)
    driver = f.client("driver-00000-00000")
    f.receive(driver, Progress(step=3, weight_version=4, summary={"steps": 3}))
    f.clear()
    f.receive(driver, FinishRun(outcome="failed", reason="the loss is NaN", summary={"steps": 4}))
    f.die("driver-00000-00000")
    assert not f.verdicts
    f.pass_time(2)
    (verdict,) = f.verdicts
    assert (verdict.outcome, verdict.reason, verdict.summary["steps"]) == ("failed", "the loss is NaN", 4)
    assert not f.orders(ReservePorts, StartWorker)


def test_what_a_driver_of_the_last_incarnation_still_says_is_superseded(fleet, pool):
    f = training_run(fleet, pool)
    driver = f.client("driver-00000-00000")
    f.die("trainer-00000-00000")
    f.clear()
    f.receive(driver, FinishRun(outcome="failed", reason="late"))
    assert f.orders(Superseded) and not f.verdicts


def test_a_lost_node_moves_the_whole_incarnation_once_it_is_fenced(fleet, pool):
    f = training_run(fleet, pool)
    home = {worker.node for part in PARTS for worker in f.cell(part).workers}
    lost = next(agent for agent in f.agents if agent.node in home)
    lost.silent = True
    f.pass_time(30)
    assert generations(f) == dict.fromkeys(PARTS, 1) and f.phases()["driver-00000"] == "stopping"
    f.pass_time(f.core.timing.fence)
    assert generations(f) == dict.fromkeys(PARTS, 2) and not f.verdicts
    assert lost.node not in {worker.node for part in PARTS for worker in f.cell(part).workers}
    assert not f.core.group_deaths


def test_an_agent_that_was_told_to_leave_cancels_the_run(fleet, pool):
    f = training_run(fleet, pool, nodes=1)
    f.receive(
        f.agents[0].peer,
        WorkerExited(worker="driver-00000-00000", generation=Generation(1, 1), signal=15, cause="stopped"),
    )
    assert f.verdicts[0].outcome == "cancelled"


def test_a_draining_run_starts_no_incarnation(fleet, pool):
    f = training_run(fleet, pool)
    f.receive(f.agents[0].peer, DrainRequest(reason="walltime"))
    f.die("executor-00000-00000")
    f.apply(Tick())
    assert f.verdicts[0].outcome == "drained" and "executor-00000" in f.verdicts[0].reason
