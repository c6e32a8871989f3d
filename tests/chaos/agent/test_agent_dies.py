"""Agents and wardens of whole runs are killed; the run goes on from its last commit."""

import os
import signal

import pytest

from tests.chaos.conftest import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

STEPS = "steps=24"
# A fifth of a second a step at the least, on any machine: the run must still be there for the last thing done to it.
PACE = "inference.fake_token_ms=30"
ONE_NODE = "cluster.local_nodes=1"


def test_a_one_node_run_survives_its_agent_and_the_hub_beside_it(smoke, undisturbed):
    run = smoke(STEPS, PACE, ONE_NODE)
    run.reach(8)
    agent, hub = run.process_of("agent"), run.hub_pid()
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: run.process_of("agent") != agent and run.process_of("hub") != hub, "a new agent and a new hub")
    summary = run.end()
    assert summary["outcome"] == "finished" and summary["attempt"] == 0, run.tail()
    assert run.ledger() == undisturbed(STEPS)


def test_a_node_whose_agent_dies_comes_back_and_gets_work_again(smoke, undisturbed):
    run = smoke(STEPS, PACE)
    run.reach(6)
    agent, hub = run.process_of("agent", "node-00001"), run.hub_pid()
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: len(run.events("agent_joined")) >= 3, "the node to join again")
    summary = run.end()
    assert summary["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(STEPS)
    assert {line["node"] for line in run.events("agent_joined")} == {"node-00000", "node-00001"}
    assert hub > 0 and len(run.events("hub_started")) == 1


def test_a_controller_whose_loop_stands_still_is_replaced(smoke, undisturbed):
    """It is alive, and its port takes connections: only its progress counter tells."""
    run = smoke(STEPS, PACE, "timing.stall=4")
    run.reach(4)
    controller = run.pid("controller-00000-00000")
    os.kill(controller, signal.SIGSTOP)
    run.pid("controller-00000-00000", other_than=controller)
    assert any("progress counter stands" in line["how"] for line in run.events("worker_exited"))
    assert run.end()["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(STEPS)
