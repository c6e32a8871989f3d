"""Tools that measure say where a goal was missed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch):
    def load(name: str):
        monkeypatch.syspath_prepend(str(TOOLS / name))
        spec = importlib.util.spec_from_file_location(f"{name}_main", TOOLS / name / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_fleet_whose_deaths_are_wrong_is_told_from_one_on_a_slow_machine(tool):
    fleet = tool("simulate_fleet")
    good = {"hub_cpu_pct": 35.0, "lag_p99_ms": 2.0, "kb_per_agent": 30.0, "deaths": 9, "deaths_decided": 9}
    good["false_deaths"] = 0
    assert fleet.misses(good) == fleet.wrong_deaths(good) == {}
    slow = {**good, "lag_p99_ms": 11.0, "hub_cpu_pct": None}
    assert fleet.misses(slow) == {"lag_p99_ms": "at most 10"} and fleet.wrong_deaths(slow) == {}
    for wrong in ({"deaths_decided": 8}, {"false_deaths": 1}):
        assert list(fleet.misses({**good, **wrong})) == list(fleet.wrong_deaths({**good, **wrong})) == list(wrong)


def test_the_table_beside_ray_marks_what_was_missed(tool):
    bench = tool("bench_control")
    found = {ours: 10.0 for _, ours, _, _ in bench.QUESTIONS} | dict(bench.LIMITS)
    found["raw_p50_us"] = 1.0
    assert not any("missed" in line for line in bench.table(found))
    rays = {rays: 10.0 / goal if ours == "rpc_per_s" else 10.0 * goal for _, ours, rays, goal in bench.QUESTIONS}
    assert not any("missed" in line for line in bench.table(found | rays))
    assert sum(line.endswith("missed") for line in bench.table({**found, **rays, "rpc_per_s": 9.0})) == 1
    assert sum(line.endswith("missed") for line in bench.table({**found, **rays, "rpc_p50_us": 11.0})) == 1
    unknown = {**found, "agent_files_opened": None, "death_ms_p99": 101.0}
    (line,) = [line for line in bench.table(unknown) if "missed" in line]
    assert line.startswith("death_ms_p99")
