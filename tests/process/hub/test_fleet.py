"""200 simulated agents, each with a connection and a handshake of its own, by the tool that simulates 10,000."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

TOOL = Path(__file__).parents[3] / "tools" / "simulate_fleet"


def simulate(*words: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *words]
    if limit:
        command = ["/bin/sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_two_hundred_agents_register_obey_and_two_deaths_are_the_only_ones_seen():
    done = simulate("--agents", "200", "--seconds", "4", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["agents"] == 200 and found["registered_s"] > 0 and found["hub_files"] >= 200
    assert found["commands"] > 0 and found["commands_lost"] == 0
    assert (found["deaths_decided"], found["false_deaths"]) == (2, 0)
    # Shared with other tests, the machine says nothing about speed; these are far above what the hub needs.
    assert found["kb_per_agent"] < 120 and found["hub_cpu_pct"] < 60


def test_a_fleet_that_the_limit_of_open_files_cannot_hold_is_refused_with_the_number():
    done = simulate("--agents", "10000", "--json", limit="1024")
    assert done.returncode == 2
    assert "needs 11409 open files, but the limit is 1024 and the hard limit 1024" in done.stderr
