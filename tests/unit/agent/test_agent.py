"""What one turn of the agent's loop does, with parts that only note what they are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles_hpc.agent.agent import Agent

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
