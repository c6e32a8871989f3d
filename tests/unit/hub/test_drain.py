"""Drain: one event with many triggers; the driver commits, or the run stops on its last commit."""

import pytest

from miles_hpc.hub.actions import HubSignalled, Send, VerdictWritten
from miles_hpc.hub.site import SiteSeen
from miles_hpc.wire.messages import (
    CancelRun,
    Done,
    Draining,
    DrainRequest,
    DrainRun,
    FinishRun,
    Shutdown,
    StartWorker,
)

pytestmark = pytest.mark.unit


def draining_run(fleet, pool, **more):
    """Two nodes with an engine and a driver that is connected; returns the fleet and the driver's connection."""
    f = fleet(pool("engine"), pool("driver", category="driver", restart="fail_run"), nodes=2, **more)
    peer = f.client("driver-00000-00000")
    f.clear()
    return f, peer


def test_an_agent_asks_and_the_driver_is_given_time_to_commit(fleet, pool):
    f, driver = draining_run(fleet, pool)
    f.receive(f.agents[1].peer, DrainRequest(reason="SIGUSR2 of Slurm", deadline_s=30.0))
    assert f.sent == [Send(driver, Draining(reason="SIGUSR2 of Slurm", deadline_s=30.0))]
    f.pass_time(20)
    f.receive(driver, FinishRun(outcome="drained", reason="SIGUSR2 of Slurm", summary={"steps": 4}))
    (verdict,) = f.verdicts
    assert (verdict.outcome, verdict.exit_code, verdict.summary["steps"]) == ("drained", 75, 4)
    f.apply(VerdictWritten())
    assert f.orders(Shutdown) == [Shutdown(reason="drained", exit_code=75)] * 2


def test_the_first_request_counts(fleet, pool):
    f, _ = draining_run(fleet, pool)
    f.receive(f.agents[1].peer, DrainRequest(reason="first", deadline_s=30.0))
    f.receive(f.agents[0].peer, DrainRequest(reason="second", deadline_s=300.0))
    assert len(f.orders(Draining)) == 1
    f.pass_time(31)
    assert f.verdicts[0].outcome == "drained" and f.verdicts[0].reason.startswith("first; the driver did not commit")


def test_without_a_deadline_the_configured_one_holds(fleet, pool):
    f, _ = draining_run(fleet, pool)
    f.receive(b"op", DrainRun(call_id="1"))
    assert f.orders(Draining, Done) == [
        Draining(reason="drained by an operator", deadline_s=f.core.timing.drain),
        Done(call_id="1"),
    ]
    f.pass_time(f.core.timing.drain - 1)
    assert not f.verdicts
    f.pass_time(1.5)
    assert f.verdicts[0].outcome == "drained"


@pytest.mark.parametrize(("kill_wait", "left"), [(None, 20.0), (30.0, 20.0), (16.0, 8.0), (5.0, 2.5), (600.0, 20.0)])
def test_when_the_scheduler_ends_the_job_the_commit_fits_into_its_kill_wait(fleet, pool, kill_wait, left):
    f, _ = draining_run(fleet, pool)
    f.apply(SiteSeen(kill_wait=kill_wait))
    f.receive(f.agents[0].peer, DrainRequest(reason="SIGTERM", ending=True))
    assert [order.deadline_s for order in f.orders(Draining)] == [left]


def test_a_warning_leaves_the_time_that_is_configured(fleet, pool):
    f, _ = draining_run(fleet, pool)
    f.apply(SiteSeen(kill_wait=5.0))
    f.receive(f.agents[0].peer, DrainRequest(reason="SIGUSR2"))
    assert [order.deadline_s for order in f.orders(Draining)] == [f.core.timing.drain]
    # The end itself comes before the commit: what is left is less than was promised.
    f.receive(f.agents[1].peer, DrainRequest(reason="SIGTERM", ending=True))
    f.receive(f.agents[0].peer, DrainRequest(reason="SIGTERM", ending=True))
    assert [(order.reason, order.deadline_s) for order in f.orders(Draining)][1:] == [("SIGUSR2", 2.5)]
    f.pass_time(3)
    assert f.verdicts[0].outcome == "drained" and f.verdicts[0].reason.startswith("SIGUSR2; the driver did not commit")


def test_a_hub_that_gets_the_signal_itself_knows_the_kill_wait_too(fleet, pool):
    f, _ = draining_run(fleet, pool, drain_on_signal=True)
    f.apply(SiteSeen(kill_wait=12.0))
    f.apply(HubSignalled("SIGTERM"))
    assert [order.deadline_s for order in f.orders(Draining)] == [6.0]


def test_nothing_is_started_while_the_run_drains(fleet, pool):
    f, _ = draining_run(fleet, pool)
    f.receive(b"op", DrainRun(call_id="1", deadline_s=60.0))
    f.die("engine-00000-00000")
    f.pass_time(30)
    assert not f.orders(StartWorker) and f.phases()["engine-00000"] == "waiting" and not f.verdicts


def test_the_drivers_death_ends_the_drain_on_the_last_commit(fleet, pool):
    f, _ = draining_run(fleet, pool)
    f.receive(b"op", DrainRun(call_id="1", reason="maintenance"))
    f.die("driver-00000-00000")
    (verdict,) = f.verdicts
    assert verdict.outcome == "drained" and "maintenance" in verdict.reason and "last commit" in verdict.reason


def test_a_run_that_has_no_driver_yet_ends_at_once(fleet, pool):
    f = fleet(pool("engine"), pool("driver", category="driver"), nodes=2, join=False)
    f.join(0)
    f.receive(f.agents[0].peer, DrainRequest(reason="preempted"))
    assert f.verdicts[0].outcome == "drained"


def test_a_driver_that_connects_late_hears_of_the_drain(fleet, pool):
    f = fleet(pool("driver", category="driver", restart="fail_run"))
    f.receive(b"op", DrainRun(call_id="1", deadline_s=10.0))
    f.now += 4.0
    peer = f.client("driver-00000-00000")
    (told,) = [a.message for a in f.sent if isinstance(a, Send) and a.peer == peer and isinstance(a.message, Draining)]
    assert told.deadline_s == 6.0


def test_agents_that_leave_while_the_run_drains_make_it_drained(fleet, pool):
    f = fleet(pool("driver", category="driver", restart="fail_run"), drain_on_signal=True)
    f.apply(HubSignalled("SIGTERM"))
    assert not f.verdicts
    f.die("driver-00000-00000", signal=15, exit_code=None, cause="stopped")
    assert f.verdicts[0].outcome == "drained"


def test_an_operator_may_still_cancel_and_a_driver_still_finish(fleet, pool):
    f, _ = draining_run(fleet, pool)
    f.receive(b"op", DrainRun(call_id="1"))
    f.receive(b"op", CancelRun(call_id="2"))
    assert f.verdicts[0].outcome == "cancelled"
    f, driver = draining_run(fleet, pool)
    f.receive(b"op", DrainRun(call_id="1"))
    f.receive(driver, FinishRun(outcome="finished"))
    assert f.verdicts[0].outcome == "finished"
