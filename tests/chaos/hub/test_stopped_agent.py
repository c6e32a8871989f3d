"""An agent stands still for a while: its node is suspect, then dead, and when it wakes it stops what was superseded."""

import os
import signal

import psutil
import pytest

from ..conftest import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = "steps=40"
# Longer than the time until the node is dead, however fast the machine is: the workers of a stopped agent go on.
PACE = "inference.fake_token_ms=40"


def test_a_stopped_agents_cells_are_replaced_and_what_it_still_had_is_stopped(smoke, undisturbed):
    run = smoke(STEPS, PACE)
    run.reach(4)
    theirs = [
        pid for cell, pids in run.pids("engine-policy-0").items() if run.cell(cell).node == "node-00001" for pid in pids
    ]
    assert theirs
    agent = run.process_of("agent", "node-00001")
    os.kill(agent, signal.SIGSTOP)
    try:
        wait_for(lambda: bool(run.events("node_suspect")), "SUSPECT", 30)
        wait_for(lambda: bool(run.events("node_dead")), "DEAD", 30)
        (suspect,), (dead,) = run.events("node_suspect"), run.events("node_dead")
        assert suspect["node"] == dead["node"] == "node-00001"
        # On the hub's clock, less the time for which it stood still itself.
        assert 3 < suspect["silent_s"] < 8 and 10 < dead["silent_s"] < 15
        engines = run.pids("engine-policy-0")
        assert {run.cell(cell).node for cell in engines} == {"node-00000"}
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_for(lambda: bool(run.events("node_back")), "the node's return", 30)
    wait_for(lambda: not any(map(psutil.pid_exists, theirs)), "what was superseded to end", 30)
    summary = run.end(200)
    assert summary["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(STEPS)
