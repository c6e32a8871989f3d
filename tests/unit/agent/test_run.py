"""How the agent's program ends."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from miles_hpc.agent import agent as agent_module
from miles_hpc.agent import run as agent_run
from miles_hpc.agent.exits import BROKEN
from miles_hpc.agent.supervise import SpawnError

pytestmark = pytest.mark.unit


@pytest.fixture
def begun(monkeypatch):
    """What a main that is given `ARGUMENTS` has begun with."""
    for name in ("_raise_file_limit", "allocator", "_options"):
        monkeypatch.setattr(agent_run, name, MagicMock())
    begun = MagicMock()
    monkeypatch.setattr(agent_run, "Beginning", lambda options: begun)
    return begun


ARGUMENTS = ["--run-dir", "/nowhere", "--attempt", "0", "--node-index", "0", "--address", "127.0.0.1"]


def test_an_agent_that_cannot_start_its_hub_closes_its_log(begun, capsys):
    begun.start.side_effect = SpawnError("no process left")
    assert agent_run.main(ARGUMENTS) == 1
    begun.log.close.assert_called_once_with()
    assert "no process left" in capsys.readouterr().err


def test_an_agent_that_cannot_go_on_beside_its_hub_says_why(begun, monkeypatch, capsys):
    monkeypatch.setattr(agent_module, "Agent", MagicMock(side_effect=OSError("no port left")))
    assert agent_run.main(ARGUMENTS) == 1
    begun.start.assert_called_once_with()
    begun.log.close.assert_called_once_with()
    assert "agent of node 0 on 127.0.0.1: no port left" in capsys.readouterr().err


def test_an_agent_that_breaks_shows_where_and_asks_for_another(begun, capsys):
    begun.start.side_effect = RuntimeError("this was not foreseen")
    assert agent_run.main(ARGUMENTS) == BROKEN
    begun.log.close.assert_called_once_with()
    said = capsys.readouterr().err
    assert "Traceback" in said and "RuntimeError: this was not foreseen" in said
