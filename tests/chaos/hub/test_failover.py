"""The hub's node is lost, cut off or frozen: one hub acts at any time, and the run ends as if nothing had been."""

import contextlib
import os
import re
import signal
import time

import psutil
import pytest

from miles_hpc.rollout.commits import read_chain

from ..conftest import wait_for
from ..in_flight import Creations
from .namespaces import SpreadRun

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SOON = ("timing.failover_max=17", "timing.hub_stall=18", "timing.fence=24")
"""The order of the deadlines holds, and stateful cells are replaced in half the time."""


@pytest.fixture
def spread(tmp_path):
    runs = []

    def start(nodes, *sets):
        runs.append(SpreadRun(tmp_path / f"spread{len(runs)}", nodes, *sets))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_the_hubs_node_is_lost_and_another_one_takes_over(spread, undisturbed):
    steps = "steps=40"
    run = spread(3, steps, *SOON)
    run.reach(6)
    engines = {index: run.engines_on(index) for index in (1, 2)}
    lost = time.monotonic()
    run.lose(0)
    run.hub_of_epoch(2, 40)
    print(f"another hub after {time.monotonic() - lost:.1f} s")
    assert run.epochs() == [1, 2] and run.hubs() == [1]
    assert all(engines[index] <= run.engines_on(index) for index in engines)
    summary = run.end(200)
    assert summary["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(steps)


def test_an_agent_that_is_cut_off_claims_nothing(spread):
    run = spread(3, "steps=4000")
    run.reach(3)
    run.net.cut(2)
    started = time.monotonic()
    wait_for(lambda: time.monotonic() - started > 40, "40 s without the link of one node")
    assert run.epochs() == [1] and run.hubs() == [0]
    run.net.join(2)
    wait_for(lambda: run.alive_nodes() == 3, "the node's return", 60)
    assert run.epochs() == [1]


def test_a_hub_whose_link_is_cut_gives_way_to_the_majority_and_steps_down(spread):
    run = spread(3, "steps=4000")
    run.reach(3)
    engines = {index: run.engines_on(index) for index in (1, 2)}
    run.net.cut(0)
    found = run.hub_of_epoch(2, 60)
    assert found.hub.startswith(f"{run.net.address(1)}:")
    started = time.monotonic()
    wait_for(lambda: time.monotonic() - started > 20, "the cut to last")
    run.net.join(0)
    wait_for(lambda: run.hubs() == [1], "the old hub to step down", 30)
    wait_for(lambda: run.alive_nodes() == 3, "all nodes with the new hub", 60)
    assert all(engines[index] <= run.engines_on(index) for index in engines)
    assert run.epochs() == [1, 2]


def test_a_frozen_node_that_is_thawed_finds_itself_replaced(spread):
    run = spread(3, "steps=4000", "train.save_every=1")
    run.reach(3)
    run.freeze(0)
    run.hub_of_epoch(2, 60)
    reached = run.step()
    run.reach(reached + 5, 150)
    run.thaw(0)
    wait_for(lambda: run.hubs() == [1], "the thawed hub to step down", 30)
    run.reach(run.step() + 5)
    numbers = [int(path.stem) for path in (run.run_dir / "commits").glob("[0-9]*.json")]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert run.epochs() == [1, 2]


def stop_in_a_commit(run, patience_s=60.0):
    """Stop the driver between the temporary file of a commit and its link. Returns its pid and the commit's number."""
    commits = run.run_dir / "commits"
    deadline = time.monotonic() + patience_s
    with contextlib.closing(Creations(commits)) as created:
        while time.monotonic() < deadline:
            # `.00007.json.PID.hex`
            for found in filter(None, (re.fullmatch(r"\.(\d+)\.json\.(\d+)\.\w+", n) for n in created.wait(1.0))):
                target, driver = commits / f"{found[1]}.json", psutil.Process(int(found[2]))
                driver.suspend()
                while driver.status() != psutil.STATUS_STOPPED:
                    assert time.monotonic() < deadline, driver
                if (commits / found[0]).exists() and not target.exists():
                    return driver.pid, int(found[1])
                driver.resume()  # it was faster: the next one
    raise AssertionError(f"no commit was caught in the middle within {patience_s:g} s")


def test_a_node_that_is_stopped_in_the_middle_of_a_commit_commits_nothing_when_it_wakes_up(spread):
    run = spread(3, "steps=4000", "train.save_every=1", *SOON)
    run.reach(3)
    home = run.node_of("driver-00000")
    assert home != 0, "stateful cells avoid the hub's node"
    driver, n = stop_in_a_commit(run)
    run.freeze(home)
    assert run.node_of("driver-00000") == home
    reached = run.step()
    wait_for(lambda: run.node_of("driver-00000") != home, "the incarnation to start elsewhere", 120)
    run.reach(reached + 5, 120)
    (at_n,) = [commit for commit in read_chain(run.run_dir) if commit.n == n]
    assert at_n.kind == "open", "the new incarnation took the number that the old one was about to take"
    drafts = list((run.run_dir / "commits").glob(f".{n:05d}.json.{driver}.*"))
    assert len(drafts) == 1, "the old driver is still in the middle of it"
    run.thaw(home)
    wait_for(lambda: run.alive_nodes() == 3, "the node's return", 60)
    run.reach(run.step() + 5)
    wait_for(lambda: run.superseded_is_gone(home), "what was superseded to end", 30)
    chain = read_chain(run.run_dir)
    assert [commit.n for commit in chain] == list(range(1, len(chain) + 1)) and at_n in chain
    assert [commit.kind for commit in chain].count("open") == 2 and run.epochs() == [1]
    steps = [commit.step for commit in chain if commit.kind == "step"]
    assert steps == sorted(set(steps)), "every step is committed once"


def test_a_hub_that_is_stopped_for_a_while_loses_nobody(spread):
    run = spread(2, "steps=4000")
    run.reach(3)
    hub = run.hub_pid()
    os.kill(hub, signal.SIGSTOP)
    started = time.monotonic()
    wait_for(lambda: time.monotonic() - started > 20, "20 s without the hub's loop")
    os.kill(hub, signal.SIGCONT)
    reached = run.step()
    assert run.hub_of_epoch(1).epoch == 1 and run.hub_pid() == hub
    run.reach(reached + 5)
    assert not run.events("node_dead") and run.epochs() == [1]


def test_a_hub_that_stands_still_is_started_again_before_any_fence(spread):
    run = spread(2, "steps=4000", *SOON)
    run.reach(3)
    pools = ("engine-policy-0", "trainer", "driver", "executor")
    before = {pool: run.pids(pool) for pool in pools}
    os.kill(run.hub_pid(), signal.SIGSTOP)
    started = time.monotonic()
    run.hub_of_epoch(2, 24)
    assert time.monotonic() - started > 16
    run.reach(run.step() + 5)
    assert {pool: run.pids(pool) for pool in pools} == before and run.epochs() == [1, 2]
