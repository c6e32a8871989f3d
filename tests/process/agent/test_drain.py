"""An agent under Slurm: its signals ask for a drain, and no worker ends before the hub says so."""

from __future__ import annotations

import os
import signal

import pytest

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config
from miles_hpc.config.timing import Timing
from miles_hpc.wire.messages import DrainRequest, Shutdown, WorkerExited

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

WORKER = "driver-00000-00000"
SLEEPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGTERM"])
def test_slurms_signal_asks_for_a_drain_and_the_hubs_end_is_waited_for(hub, nodes, name):
    warden = nodes.start(0, "--slurm")
    agent = hub.join()
    hub.start(WORKER, SLEEPER)
    number = signal.Signals[name]
    # Slurm signals every process of a step.
    for pid in (agent.pid, warden.pid) if number == signal.SIGUSR2 else (agent.pid,):
        os.kill(pid, number)
    asked = hub.expect(DrainRequest)
    assert name in asked.reason and asked.deadline_s == 0
    os.kill(agent.pid, number)
    beats = len(hub.beats())
    hub.until(lambda: len(hub.beats()) > beats + 3, "the agent to go on")
    assert len(hub.reports(DrainRequest)) == 1 and not hub.reports(WorkerExited)
    hub.send("node-00000", Shutdown(reason="drained", exit_code=75))
    assert hub.exited(WORKER).cause == "stopped"
    assert warden.wait(10) == 75


def test_without_an_end_from_the_hub_the_node_stops_by_itself(hub, nodes, run_dir):
    (run_dir / "config.resolved.toml").unlink()
    write_resolved(Config(timing=Timing(drain=0.5)), run_dir)
    warden = nodes.start(0, "--slurm")
    agent = hub.join()
    hub.start(WORKER, SLEEPER)
    os.kill(agent.pid, signal.SIGTERM)
    hub.expect(DrainRequest)
    assert hub.exited(WORKER, timeout_s=20).cause == "stopped"
    assert warden.wait(10) == 1
