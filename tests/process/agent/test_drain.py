"""An agent under Slurm: its signals ask for a drain, and no worker ends before the hub says so."""

from __future__ import annotations

import os
import signal

import pytest

from miles_hpc.agent import procfs
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
    assert name in asked.reason and asked.deadline_s == 0 and asked.ending == (name == "SIGTERM")
    os.kill(agent.pid, number)
    beats = len(hub.beats())
    hub.until(lambda: len(hub.beats()) > beats + 3, "the agent to go on")
    assert len(hub.reports(DrainRequest)) == 1 and not hub.reports(WorkerExited)
    hub.send("node-00000", Shutdown(reason="drained", exit_code=75))
    assert hub.exited(WORKER).cause == "stopped"
    assert warden.wait(10) == 75


OWN = """
import signal, sys
from miles_hpc.wire.program import stop_signals
for number in stop_signals():
    signal.signal(number, lambda *_: sys.exit(0))
print("up", flush=True)
while True:
    signal.pause()
"""


def test_signals_to_every_process_of_a_node_end_none_of_our_programs_before_the_hub_does(hub, nodes):
    """As scancel and the end of an allocation do, to the warden, the agent and every worker in its own session."""
    warden = nodes.start(0, "--slurm")
    hub.join()
    own = hub.start(WORKER, OWN, arguments=("-m", "miles_hpc.stand_in"))
    third_party = hub.start("engine-00000-00000", "import signal; print('up', flush=True); signal.pause()")
    logs = nodes.run_dir / "logs/attempt-0/node-00000"
    for worker in (WORKER, "engine-00000-00000"):
        log = logs / f"{worker}.g1-1.log"
        hub.until(lambda log=log: log.exists() and "up" in log.read_text(), "workers")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
        for process in nodes.marked():
            procfs.kill_checked(process, number)
    hub.expect(DrainRequest)
    ended = hub.exited("engine-00000-00000")
    assert ended.cause == "stopped_by_slurm" and ended.signal in (signal.SIGINT, signal.SIGTERM)
    beats = len(hub.beats())
    hub.until(lambda: len(hub.beats()) > beats + 5, "the agent to go on")
    assert procfs.read_process(own.pid) is not None and procfs.read_process(third_party.pid) is None
    # The warning is passed on, and that the end itself has begun; neither again and again.
    assert [asked.ending for asked in hub.reports(DrainRequest)] in ([False, True], [True])
    assert not hub.reports(WorkerExited, WORKER)
    hub.send("node-00000", Shutdown(reason="drained", exit_code=75))
    stopped = hub.exited(WORKER)
    assert (stopped.cause, stopped.exit_code) == ("stopped", 0)
    assert warden.wait(40) == 75
    assert nodes.marked() == []


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
