"""Whole runs of `smoke`: what may die heals, what may not ends the run clearly, and no ledger differs for it."""

from __future__ import annotations

import os
import signal

import pytest

from .conftest import wait_for
from .in_flight import freeze_busy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

STATELESS = [
    "engine-policy-0-00000-00000",
    "rollout-worker-00001-00000",
    "session-server-00000-00000",
    "router-policy-00000-00000",
]
STATEFUL = ["driver-00000-00000", "executor-00000-00000", "controller-00000-00000", "trainer-00000-00001"]
STEPS = "steps=24"


def adds_up(summary):
    groups = summary["groups"]
    return groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())


def test_each_stateless_part_dies_with_work_in_flight_beside_a_run_that_notices_nothing(smoke):
    settings = ("steps=60", "inference.fake_token_ms=40")
    quiet, run = smoke(*settings, name="quiet"), smoke(*settings, name="hurt")
    run.reach(1)
    for worker in STATELESS:
        pid = freeze_busy(run, worker)
        os.kill(pid, signal.SIGKILL)
        # The one in its place is met in the middle of work too, and goes on with it.
        os.kill(freeze_busy(run, worker, other_than=pid), signal.SIGCONT)
    summary, undisturbed = run.end(), quiet.end()
    assert (summary["outcome"], summary["steps"], summary["exit_code"]) == ("finished", 60, 0), run.tail()
    assert summary["cells"] == {"started": 11, "healed": len(STATELESS)}
    assert summary["groups"]["committed"] == 60 * 8 and adds_up(summary)
    assert undisturbed["outcome"] == "finished" and undisturbed["cells"]["healed"] == 0
    assert undisturbed["groups"] == {"dispatched": 480, "committed": 480, "returned": 0, "dropped": {}}
    assert run.ledger() == quiet.ledger() and len(run.ledger()) == 480
    assert run.left() == quiet.left() == []


def test_attempts_that_end_by_the_death_of_a_stateful_part_or_of_the_command_add_up_to_one_run(smoke, undisturbed):
    settings = (STEPS, "heal.budget=0", "train.save_every=4")
    for attempt, worker in enumerate([*STATEFUL, "command"]):
        run = smoke(*settings, resume=attempt > 0)
        run.reach(4 * attempt + 3)
        if worker == "command":
            run.process.kill()
            run.process.wait()
            wait_for(lambda run=run: not run.left(), "everything to end with the command")
            continue
        run.kill(worker)
        summary = run.end(60)
        assert run.process.returncode == 1 and summary["outcome"] == "failed", run.tail()
        assert summary["attempt"] == attempt and summary["steps"] >= 4 * attempt and adds_up(summary), summary
        last = run.last_line()
        assert last.startswith("miles-hpc: failed: ") and worker in last, last
        assert "; log /" in last and last.endswith("--resume"), last
        assert run.left() == []
    run = smoke(*settings, resume=True)
    summary = run.end()
    assert (summary["outcome"], summary["attempt"], summary["steps"]) == ("finished", 5, 24), run.tail()
    assert summary["groups"]["committed"] == 24 * 8 and adds_up(summary)
    assert run.ledger() == undisturbed(STEPS)
    versions = [row["weight_version"] for row in run.metrics()]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_within_ten_seconds(smoke, number):
    run = smoke("steps=400", "inference.fake_token_ms=40")
    run.reach(2)
    run.process.send_signal(number)
    wait_for(lambda: not run.left(), "everything to end", 10)
    summary = run.end(30)
    assert run.process.returncode == summary["exit_code"] == 130 and summary["outcome"] == "cancelled"
    assert run.last_line().startswith(f"miles-hpc: cancelled: cancelled by {number.name}; log /")
    assert adds_up(summary), summary


def test_an_exception_in_the_driver_ends_everything_and_is_the_last_line(smoke, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def score(sample):\n    if sample.epoch:\n        raise ValueError('no reward today')\n    return 1.0\n"
    )
    run = smoke("steps=400", "reward.function=my_reward:score", f"python_path=['{tmp_path}']")
    summary = run.end()
    assert run.left() == []
    assert run.process.returncode == 1 and summary["outcome"] == "failed", run.tail()
    # The first data epoch has 12 steps.
    assert summary["steps"] == 12 and adds_up(summary), summary
    assert "no reward today" in run.last_line() and "driver" in run.last_line(), run.last_line()
