"""Real processes that a worker cannot live without: their ends are found with and without pidfds, and named."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_hpc.agent import essentials, procfs
from miles_hpc.agent.essentials import LOOK_S, SETTLE_S, Essentials
from miles_hpc.agent.probes import Finding
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit

W, G = "engine-00000-00000", Generation(1, 1)
WAIT = "import sys; print(flush=True); sys.exit(int(sys.stdin.readline() or 0))"


FORK = """
import os, signal, sys
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Parts:
    """Processes that wait for an exit code, under the watch of one `Essentials`."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watch = Essentials(self.clock)
        self.processes: list[subprocess.Popen[str]] = []
        self.said = 0
        """What the last one that was started has printed."""

    def start(self, name: str, program: str = WAIT) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        self.said = int(process.stdout.readline().strip() or 0)
        return process

    def add(self, *texts: str) -> list[str]:
        return self.watch.add(W, G, [process.pid for process in self.processes], texts or ("part::",))

    def advance(self) -> list[Finding]:
        poller = select.poll()
        for fileno in self.watch.filenos():
            poller.register(fileno, select.POLLIN)
        return self.watch.advance({fileno for fileno, _ in poller.poll(0)})

    def until_seen(self) -> None:
        """Until a death is known, and waits for its verdict."""
        deadline = time.monotonic() + 30
        while not (self.clock.now < self.watch.next_deadline() <= self.clock.now + SETTLE_S):
            assert time.monotonic() < deadline
            if not self.watch.filenos():
                self.clock.now += LOOK_S
            assert self.advance() == []
            time.sleep(0.005)

    def verdict(self) -> Finding:
        self.until_seen()
        self.clock.now += SETTLE_S
        (finding,) = self.advance()
        assert self.advance() == [] and self.watch.filenos() == []
        assert self.watch.next_deadline() == float("inf")
        return finding

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(params=["pidfd", "looks"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    """Once with pidfds, once as on a kernel without."""
    if request.param == "looks":
        monkeypatch.delattr(os, "pidfd_open")
    made = Parts()
    yield made
    made.close()


def test_a_killed_one_is_named_with_its_signal_once_the_rest_of_the_worker_had_time_to_end(parts):
    part, _ = parts.start("part::one"), parts.start("part::two")
    assert len(parts.add()) == 2
    assert parts.advance() == []
    part.send_signal(signal.SIGKILL)
    finding = parts.verdict()
    assert (finding.worker, finding.generation, finding.kind, finding.signal) == (W, G, "process_lost", 9)
    assert f"its process part::one (pid {part.pid})" in finding.text
    assert finding.text.endswith("was killed by signal 9")


@pytest.mark.parametrize(("code", "how"), [("3", "ended with exit code 3"), ("0", "has ended")])
def test_one_that_ends_by_itself_is_lost_as_well(parts, code, how):
    part = parts.start("part::one")
    parts.add()
    part.stdin.write(f"{code}\n")
    part.stdin.flush()
    finding = parts.verdict()
    assert finding.text.endswith(how) and finding.signal is None


def test_one_whose_parent_was_faster_has_ended(parts):
    part = parts.start("part::one")
    parts.add()
    part.kill()
    part.wait()
    assert parts.verdict().text.endswith("has ended")


def test_others_and_later_ones_end_as_they_like(parts):
    other, _ = parts.start("compiler"), parts.start("part::one")
    (found,) = parts.add()
    assert "part::one" in found
    later = parts.start("part::late")
    for process in (other, later):
        process.kill()
        process.wait()
    parts.clock.now += LOOK_S
    assert parts.advance() == []


def test_what_an_essential_one_has_forked_ends_as_it_likes(parts):
    parent = parts.start("part::one", FORK)
    try:
        assert procfs.command_line(parts.said) == procfs.command_line(parent.pid)
        (found,) = parts.watch.add(W, G, [parts.said, parent.pid], ("part::",))
        assert f"(pid {parent.pid})" in found
    finally:
        os.kill(parts.said, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while procfs.read_process(parts.said) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for _ in range(2):
        parts.clock.now += LOOK_S
        assert parts.advance() == []
    parent.kill()
    assert parts.verdict().signal == signal.SIGKILL


def test_a_worker_that_is_stopped_or_has_ended_before_the_verdict_is_not_judged(parts):
    part = parts.start("part::one")
    parts.add()
    part.kill()
    parts.until_seen()
    parts.watch.remove(W)
    parts.clock.now += SETTLE_S
    assert parts.advance() == [] and parts.watch.filenos() == []


def test_a_worker_without_such_processes_costs_nothing(parts):
    parts.start("part::one")
    assert parts.watch.add(W, G, [parts.processes[0].pid], ()) == []
    assert parts.add("nothing like that") == []
    assert parts.watch.filenos() == [] and parts.watch.next_deadline() == float("inf")


def test_descriptors_are_given_back(parts):
    parts.start("part::one")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        parts.add()
    parts.watch.remove(W)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_pid_that_was_given_to_another_process_is_an_end(parts, monkeypatch):
    parts.start("part::one")
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    parts.add()
    found = essentials.procfs.read_process(parts.processes[0].pid)
    found.start += 1
    monkeypatch.setattr(essentials.procfs, "read_process", lambda pid: found)
    assert parts.verdict().text.endswith("has ended")
