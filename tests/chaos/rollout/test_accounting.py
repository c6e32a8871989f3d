"""Every role of a run is killed once, two or three in a run, at moments that a printed seed chooses: the ledger is that
of a run that nobody hurt, the groups add up, nothing hangs and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from ..conftest import wait_for
from ..hub.namespaces import SpreadRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SEED = int(os.environ.get("CHAOS_SEED", time.time_ns() % 1_000_000))
STEPS = ("steps=20", "inference.fake_token_ms=50", "train.save_every=4", "heal.backoff_s=0.1")
ROLES = [
    "rollout-worker-00000-00000",
    "executor-00000-00000",
    "trainer-00000-00001",
    "driver-00000-00000",
    "controller-00000-00000",
    "router-policy-00000-00000",
    "engine-policy-0-00001-00000",
    "session-server-00001-00000",
    "hub",
]
RUNS = [ROLES[0::3], ROLES[1::3], ROLES[2::3]]


def adds_up(summary):
    groups = summary["groups"]
    return groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_each_role_is_killed_once_and_the_accounts_are_those_of_an_undisturbed_run(smoke, undisturbed, number):
    draw = random.Random(SEED * 10 + number)
    roles = draw.sample(RUNS[number], len(RUNS[number]))
    print(f"CHAOS_SEED={SEED} order {roles}")
    run = smoke(*STEPS)
    step = 0
    for role in roles:
        step = min(16, max(step, run.step()) + draw.randint(1, 3))
        run.reach(step)
        pid = run.hub_pid() if role == "hub" else run.pid(role)
        time.sleep(draw.uniform(0, 0.3))  # the moment, not a wait: anywhere inside a step
        os.kill(pid, signal.SIGKILL)
        if role == "hub":
            run.hub_of_epoch(2)
        else:
            run.pid(role, other_than=pid)
    summary = run.end()
    assert (summary["outcome"], summary["steps"]) == ("finished", 20), (SEED, run.tail())
    assert summary["groups"]["committed"] == 20 * 8 and adds_up(summary), (SEED, summary)
    assert run.ledger() == undisturbed(*STEPS), SEED
    versions = [row["weight_version"] for row in run.metrics()]
    assert versions == sorted(set(versions)), SEED
    assert run.left() == []


def test_a_rollout_worker_that_stands_still_for_longer_than_its_lease_changes_nothing(smoke, undisturbed):
    run = smoke(*STEPS)
    run.reach(3)
    pid = run.pid("rollout-worker-00000-00000")
    os.kill(pid, signal.SIGSTOP)
    try:
        at = run.step()
        # The other worker takes over what it had, once the lease is over: steps go on while it stands still.
        wait_for(lambda: run.step() >= min(at + 2, 20), "steps beside a worker that stands still", 60)
    finally:
        os.kill(pid, signal.SIGCONT)
    summary = run.end()
    assert summary["outcome"] == "finished" and adds_up(summary), run.tail()
    assert run.ledger() == undisturbed(*STEPS)
    assert run.left() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_node_whose_link_is_cut_for_a_while_changes_no_ledger(tmp_path, undisturbed):
    settings = (*STEPS, "cluster.local_nodes=3")
    run = SpreadRun(tmp_path / "run", 3, *STEPS)
    try:
        run.reach(3)
        lost = run.node_of("rollout-worker-00001") or 1
        run.net.cut(lost)
        wait_for(lambda: run.alive_nodes() == 2 or run.step() >= 18, "the hub to miss a node", 60)
        run.net.join(lost)
        wait_for(lambda: not run.alive() or run.step() >= 20, "the end", 150)
        wait_for(lambda: not run.alive(), "all agents to end", 60)
        ledger = run.ledger()
    finally:
        run.close()
    assert ledger == undisturbed(*settings)
