"""Counters that move, stand still, and sleep together with the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_hpc.agent.stalls import Stalls
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.progress import VARIABLE, ProgressCounter, ProgressReader

pytestmark = pytest.mark.unit

W, G = "pool-00000-00000", Generation(1, 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _until(stalls: Stalls, clock: Clock, end: float) -> list[str]:
    found = []
    while clock.now < end:
        clock.now = min(end, max(stalls.next_deadline(), clock.now + 0.01))
        found += [finding.text for finding in stalls.advance()]
    return found


def test_a_counter_that_moves_is_no_finding():
    clock = Clock()
    stalls = Stalls(clock)
    stalls.add(W, G, lambda: int(clock.now), 4.0)
    assert _until(stalls, clock, 100.0) == []


def test_one_that_stands_still_is_found_once():
    clock = Clock()
    stalls = Stalls(clock)
    stalls.add(W, G, lambda: 7, 4.0)
    assert _until(stalls, clock, 3.9) == []
    (text,) = _until(stalls, clock, 100.0)
    assert "stands at 7 since 4 s" in text


def test_a_limit_of_0_and_a_removed_worker_are_not_judged():
    clock = Clock()
    stalls = Stalls(clock)
    stalls.add(W, G, lambda: 7, 0.0)
    stalls.add("pool-00001-00000", G, lambda: 7, 1.0)
    stalls.remove("pool-00001-00000")
    assert stalls.next_deadline() == float("inf") and _until(stalls, clock, 100.0) == []


def test_the_agent_s_own_pause_counts_for_nobody():
    clock = Clock()
    stalls = Stalls(clock)
    stalls.add(W, G, lambda: 7, 4.0)
    clock.now = 60.0
    stalls.on_pause(59.0)
    assert [finding.text for finding in stalls.advance()] == []
    assert len(_until(stalls, clock, 64.0)) == 1


def test_whether_a_counter_moved_is_said_since_the_last_question():
    clock = Clock()
    stalls = Stalls(clock)
    stalls.add(W, G, lambda: int(clock.now), 4.0)
    assert not stalls.moved(W)
    clock.now = 2.0
    assert stalls.moved(W) and not stalls.moved(W)
    assert not stalls.moved("pool-00001-00000")


def test_what_a_program_counts_its_agent_reads(tmp_path: Path):
    reader = ProgressReader(tmp_path / "counter")
    assert reader.read() == 0
    counter = ProgressCounter.from_environ({VARIABLE: str(tmp_path / "counter")})
    counter.bump()
    counter.bump()
    assert reader.read() == 2
    reader.close()
    ProgressCounter.from_environ({}).bump()
