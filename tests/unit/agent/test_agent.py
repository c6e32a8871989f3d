"""What one turn of the agent's loop does, with parts that only note what they are told."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from miles_hpc.agent.agent import Agent
from miles_hpc.agent.procfs import Process
from miles_hpc.agent.supervise import HOPELESS_AFTER, OVERDUE_EVERY, Exit, Supervisor, Worker
from miles_hpc.agent.watches import Watches
from miles_hpc.config.timing import Timing
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Goodbye, Welcome

pytestmark = pytest.mark.unit


def test_the_end_of_the_hub_is_looked_at_after_those_of_workers_that_ended_with_it():
    seen: list[str] = []
    agent = Agent.__new__(Agent)
    agent.hub = SimpleNamespace(name="hub")  # type: ignore[assignment]
    ends = [SimpleNamespace(name=name) for name in ("hub", "a", "b")]
    agent.supervisor = SimpleNamespace(advance=lambda: ends)  # type: ignore[assignment]
    agent.table = SimpleNamespace(on_exit=lambda ended, by_slurm: seen.append(ended.name))  # type: ignore[assignment]
    agent._by_slurm = lambda: False  # type: ignore[method-assign]
    agent._on_hub_exit = lambda ended: seen.append(ended.name)  # type: ignore[method-assign]
    agent._on_exits()
    assert seen == ["a", "b", "hub"]


def test_a_worker_that_was_killed_and_does_not_end_is_told_to_the_table_and_the_hubs_own_process_is_not():
    agent = Agent.__new__(Agent)
    agent.hub = SimpleNamespace(name="hub")  # type: ignore[assignment]
    agent.supervisor = Supervisor("mark/", "/run", clock=lambda: 100.0 + OVERDUE_EVERY)
    for name in ("hub", "a"):
        worker = Worker(name, Generation(1, 1), "mark", 4242, 1, 5.0, str, signal.SIGTERM, cause="probe_failed")
        worker.stopping, worker.kill_at = True, 99.0
        agent.supervisor.workers[name] = worker
    seen: list[Exit] = []
    agent.log = SimpleNamespace(write=lambda *args, **fields: None)  # type: ignore[assignment]
    agent.table = SimpleNamespace(on_overdue=lambda ending, by_slurm: seen.append(ending))  # type: ignore[assignment]
    agent._by_slurm = lambda: False  # type: ignore[method-assign]
    agent._on_overdue()
    agent._on_overdue()
    assert [(one.name, one.cause, one.exit_code, one.signal) for one in seen] == [("a", "probe_failed", None, None)]


def test_a_hub_that_lets_the_agent_in_hears_of_ends_after_what_had_waited_for_it():
    seen: list[str] = []
    agent = Agent.__new__(Agent)
    agent.link = SimpleNamespace(on_welcome=lambda: seen.append("waited"))  # type: ignore[assignment]
    agent.table = SimpleNamespace(tell_of_ends=lambda: seen.append("ends"))  # type: ignore[assignment]
    agent.log = SimpleNamespace(write=lambda *args, **fields: None)  # type: ignore[assignment]
    agent.options = SimpleNamespace(node="n", timing=Timing())  # type: ignore[assignment]
    agent._clock = time.monotonic
    agent.keeper = SimpleNamespace()  # type: ignore[assignment]
    for heartbeat, suspect_s in ((1.0, 3.0), (2.0, 6.0)):
        agent._on_message(Welcome(node="n", epoch=2, heartbeat=heartbeat, run_id="r", attempt=0))
        assert agent.keeper.suspect_s == suspect_s, "three intervals, stretched as they are"
    assert seen == ["waited", "ends"] * 2


def test_a_stop_in_the_middle_of_a_turn_is_held_against_no_worker():
    """As when the machine is suspended between the poll and the look at the workers' counters."""
    now, count = 100.0, 0
    agent = Agent.__new__(Agent)
    agent._clock, agent._turned_at, agent._stood_still = lambda: now, now, 0.0
    agent.log = SimpleNamespace(write=lambda *args, **fields: None)  # type: ignore[assignment]
    agent.keeper = SimpleNamespace(on_pause=lambda seconds: None)  # type: ignore[assignment]
    agent.watches = Watches(agent._turn_time)
    agent.watches.stalls.add("w", Generation(1, 1), lambda: count, 2.0)
    for now in (104.0, 104.5, 105.9):
        assert agent.watches.advance(set()) == []
        agent._on_turn(0.0 if now == 104.0 else 1.0)
        assert agent.watches.advance(set()) == [], now
    now = 106.5
    agent._on_turn(1.0)
    (finding,) = agent.watches.advance(set())
    assert finding.worker == "w" and "stands at 0" in finding.text


NOBODY = Process(pid=2**22 + 1, ppid=1, pgrp=1, session=1, start=1)
"""Not to be hit by any signal."""


class Leaving:
    """An agent that leaves, with one worker of which `left` is left; `told` has what the hub and the log hear."""

    def __init__(self, kill_at: float = 100.0) -> None:
        self.now = 100.0
        self.left = [NOBODY]
        self.told: list[object] = []
        self.agent = agent = Agent.__new__(Agent)
        self.supervisor = agent.supervisor = Supervisor("mark/", "/run", clock=lambda: self.now)
        self.supervisor.observe = lambda: {"a": self.left}  # type: ignore[method-assign]
        self.supervisor.strays = list  # type: ignore[assignment, method-assign]
        worker = Worker("a", Generation(1, 1), "mark/a", NOBODY.pid, 1, 5.0, str, signal.SIGTERM, known={NOBODY.pid: 1})
        worker.stopping, worker.kill_at = True, kill_at
        self.supervisor.workers["a"] = self.worker = worker
        agent._leaving, agent._goodbye_said = ("told to", 0), False
        agent.log = SimpleNamespace(  # type: ignore[assignment]
            write=lambda event, *_, **fields: self.told.append((event, fields.get("worker"))), close=lambda: None
        )
        agent.link = SimpleNamespace(report=self.told.append, close=lambda flush: None)  # type: ignore[assignment]
        agent.table = SimpleNamespace(running=lambda: bool(self.supervisor.workers))  # type: ignore[assignment]
        for part in ("_seeker", "keeper", "ports", "surroundings"):
            setattr(agent, part, SimpleNamespace(close=lambda: None))

    def turn(self, now: float) -> bool:
        """One turn of the loop. Returns whether it was the last one."""
        self.now = now
        self.supervisor.advance()
        return self.agent._finished()


def test_an_agent_that_leaves_waits_for_a_worker_that_cannot_be_killed_only_so_long_and_names_it():
    leaving = Leaving()
    assert not leaving.turn(100.0)
    assert not leaving.turn(100.0 + HOPELESS_AFTER)
    assert leaving.turn(100.1 + HOPELESS_AFTER)
    assert leaving.agent._end() == 0
    # No Goodbye: the hub would start another one in its place.
    assert leaving.told == [("left_behind", "a"), ("left", None)]


def test_an_agent_that_leaves_says_so_when_all_its_workers_are_gone():
    leaving = Leaving()
    assert not leaving.turn(100.0)
    leaving.left, leaving.worker.status = [], 9
    assert not leaving.turn(100.1)
    assert leaving.turn(100.2)
    assert leaving.agent._end() == 0
    assert leaving.told == [Goodbye(reason="told to"), ("left", None)]


@pytest.mark.parametrize("kill_at", [100.0, 300.0])
def test_an_agent_that_leaves_gives_no_worker_up_that_it_has_not_killed(kill_at):
    """Neither one that has its grace, nor after a pause of its own; and it looks before it gives up."""
    leaving = Leaving(kill_at)
    if kill_at == 100.0:
        assert not leaving.turn(200.0 + HOPELESS_AFTER)
        leaving.left, leaving.worker.status = [], 9
        assert not leaving.turn(400.0 + HOPELESS_AFTER)
        assert leaving.turn(400.1 + HOPELESS_AFTER)
        assert not leaving.supervisor.workers
    else:
        assert not leaving.turn(299.0)
