"""How the agent's program ends."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from miles_hpc.agent import run as agent_run
from miles_hpc.agent.supervise import SpawnError

pytestmark = pytest.mark.unit


def test_an_agent_that_cannot_start_its_hub_closes_its_log(monkeypatch, tmp_path, capsys):
    closed = []

    class Unlucky:
        log = SimpleNamespace(close=lambda: closed.append(True))

        def __init__(self, _: object) -> None:
            pass

        def run(self) -> int:
            raise SpawnError("no process left")

    for name in ("_raise_file_limit", "allocator", "read_node_config", "run_digest", "Options"):
        monkeypatch.setattr(agent_run, name, MagicMock())
    monkeypatch.setattr(agent_run, "Agent", Unlucky)
    given = ["--run-dir", str(tmp_path), "--attempt", "0", "--node-index", "0", "--address", "127.0.0.1"]
    assert agent_run.main(given) == 1
    assert closed == [True] and "no process left" in capsys.readouterr().err
