"""A dead driver or trainer rank costs the steps since the last commit, never the run; a dead executor costs nothing."""

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

STEPS = "steps=24"
# A fifth of a second a step at the least, on any machine: the run must still be there for the last thing done to it.
PACE = "inference.fake_token_ms=30"


def test_each_part_of_the_training_incarnation_may_die(smoke, undisturbed):
    run = smoke(STEPS, PACE)
    engines = None
    for step, victim in ((4, "driver-00000-00000"), (14, "trainer-00000-00001")):
        run.reach(step)
        engines = engines or run.pids("engine-policy-0")
        driver, before = run.pid("driver-00000-00000"), run.kill(victim)
        run.pid(victim, other_than=before)
        run.pid("driver-00000-00000", other_than=driver)
    assert run.pids("engine-policy-0") == engines
    summary = run.end()
    assert summary["outcome"] == "finished" and summary["attempt"] == 0, run.tail()
    assert run.ledger() == undisturbed(STEPS)
    groups = summary["groups"]
    assert groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())


def test_a_dead_executor_is_healed_alone_and_no_step_is_done_again(smoke, undisturbed):
    run = smoke(STEPS, PACE, "train.save_every=8")
    run.reach(4)
    driver, trainer = run.pids("driver"), run.pids("trainer")
    run.pid("executor-00000-00000", other_than=run.kill("executor-00000-00000"))
    run.reach(12)
    assert (run.pids("driver"), run.pids("trainer")) == (driver, trainer)
    summary = run.end()
    assert summary["outcome"] == "finished", run.tail()
    assert [row["step"] for row in run.metrics()] == list(range(1, 25))
    assert run.ledger() == undisturbed(STEPS)
    groups = summary["groups"]
    assert groups["committed"] == 24 * 8
    assert groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())


def test_a_dead_controller_is_healed_alone(smoke, undisturbed):
    run = smoke(STEPS, PACE)
    run.reach(6)
    trainer = run.pids("trainer")
    run.pid("controller-00000-00000", other_than=run.kill("controller-00000-00000"))
    run.reach(12)
    assert run.pids("trainer") == trainer
    assert run.end()["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(STEPS)
