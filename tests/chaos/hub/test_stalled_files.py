"""The run directory stands still on all nodes, and meanwhile something dies; or it is full."""

import json
import time
import urllib.request

import pytest

from tests.disks import FrozenDisk, SmallDisk

from ..conftest import SmokeRun, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

STALL_S = 60.0
STEPS = "steps=24"
# The run must still be there when the file system stalls, on any machine.
PACE = "inference.fake_token_ms=30"


@pytest.fixture
def disk(tmp_path):
    made = FrozenDisk(tmp_path, mebibytes=128)
    yield made
    made.close()


def served(url):
    """The engines that a router sends requests to."""
    with urllib.request.urlopen(f"{url}/workers", timeout=5) as answer:
        return {worker["url"] for worker in json.load(answer)["workers"] if worker["is_healthy"]}


def url_of(run, cell):
    row = run.cell(cell)
    node = next(node for node in run.status().nodes if node.node == row.node)
    return f"http://{node.address}:{row.workers[0].ports['http']}"


class Victim:
    """A remote engine of a run: killed, and looked for again."""

    def __init__(self, run):
        self.run = run
        remote = [row.cell for row in run.status().cells if row.pool == "engine-policy-0" and row.node != "node-00000"]
        self.cell, self.router = remote[0], url_of(run, "router-policy-00000")

    def kill(self):
        self.pid = self.run.kill(f"{self.cell}-00000")

    def is_back(self):
        row = self.run.cell(self.cell)
        return row is not None and row.state == "ready" and row.workers[0].pid != self.pid

    def check_the_end(self, undisturbed, *, may_heal=frozenset()):
        assert self.run.end()["outcome"] == "finished", self.run.tail()
        healed = {line["cell"]: line for line in self.run.events("cell_healing")}
        ends = [(line["cell"], line["reason"]) for line in self.run.events("cell_ends")]
        assert self.cell in healed and healed.keys() <= {self.cell, *may_heal}, ends
        assert not self.run.events("node_suspect") and len(self.run.events("hub_started")) == 1
        assert self.run.ledger() == undisturbed(STEPS)


def test_a_remote_engine_that_dies_while_the_run_directory_stalls_is_replaced_meanwhile(disk, tmp_path, undisturbed):
    """In both runs the control plane heals; where third-party programs must not wait in their own log lines either,
    `logs.local_dir` keeps those on the node, and the router sends requests to the new engine.
    """
    plain = SmokeRun(disk.path / "plain", STEPS, PACE)
    local = SmokeRun(disk.path / "local", STEPS, PACE, f"logs.local_dir={tmp_path / 'logs'}")
    try:
        for run in (plain, local):
            run.reach(4)
        victims = [Victim(plain), Victim(local)]
        disk.freeze(STALL_S)
        began = time.monotonic()
        for victim in victims:
            victim.kill()
        for victim in victims:
            wait_for(victim.is_back, f"the new engine of {victim.run.run_dir.name}", 30)
        wait_for(lambda: len(served(victims[1].router)) == 2, "the router to send it requests", 30)
        print(f"healed after {time.monotonic() - began:.1f} s in a stall of {STALL_S:.0f} s")
        assert time.monotonic() - began < STALL_S - 10
        wait_for(lambda: time.monotonic() - began > STALL_S, "the end of the stall", STALL_S + 5)
        # Only a program that is not ours may have waited in a line of its log until its probe called it dead.
        victims[0].check_the_end(undisturbed, may_heal={"router-policy-00000"})
        victims[1].check_the_end(undisturbed)
        logs = list((local.run_dir / "logs" / "attempt-0").rglob("*.log"))
        assert len([path for path in logs if path.name.startswith("engine-policy-0")]) == 3, logs
        assert not [path for path in (tmp_path / "logs").rglob("*") if path.is_file()], "all logs came home"
    finally:
        disk.thaw()
        plain.close()
        local.close()


def test_a_run_whose_directory_is_full_ends_by_name_and_goes_on_when_there_is_room(tmp_path, undisturbed):
    small = SmallDisk(tmp_path, mebibytes=64)
    runs = [SmokeRun(small.path, STEPS, PACE)]
    try:
        runs[0].reach(6)
        small.fill()
        assert runs[0].process.wait(90) == 1
        assert "No space left on device" in runs[0].last_line(), runs[0].tail()
        assert not runs[0].left()
        small.make_room()
        runs.append(SmokeRun(small.path, STEPS, resume=True))
        assert runs[1].end()["outcome"] == "finished", runs[1].tail()
        assert runs[1].ledger() == undisturbed(STEPS)
    finally:
        for run in runs:
            run.close()
        small.close()
