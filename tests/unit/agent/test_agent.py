"""What one turn of the agent's loop does, with parts that only note what they are told."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from miles_hpc.agent.agent import Agent
from miles_hpc.agent.supervise import OVERDUE_EVERY, Exit, Supervisor, Worker
from miles_hpc.wire.ids import Generation

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
