"""The hub's node is lost, cut off or frozen: one hub acts at any time, and the run ends as if nothing had been."""

import contextlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

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
QUIET = "inference.fake_token_ms=40"
"""A run that is there for a minute and does little meanwhile."""
CUT_S = 60.0


@pytest.fixture
def spread(tmp_path):
    runs = []

    def start(nodes, *sets):
        runs.append(SpreadRun(tmp_path / f"spread{len(runs)}", nodes, *sets))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_the_hubs_node_is_lost_and_another_one_takes_over_and_that_one_too(spread, undisturbed):
    steps = "steps=60"
    # A step takes long enough for two failovers, on any machine.
    run = spread(4, steps, "inference.fake_token_ms=120", *SOON)
    run.reach(4)
    hub = 0
    for epoch in (2, 3):
        engines = {index: run.engines_on(index) for index in range(4) if index != hub}
        lost = time.monotonic()
        run.lose(hub)
        run.hub_of_epoch(epoch, 40)
        print(f"another hub after {time.monotonic() - lost:.1f} s")
        (new,) = run.hubs()
        assert run.epochs() == list(range(1, epoch + 1))
        alive = [index for index in engines if run.processes(index)]
        assert all(engines[index] <= run.engines_on(index) for index in alive)
        if epoch == 2:
            # They avoid the first hub's node; the second one's has them, if the first candidate was not too slow.
            home = run.node_of("trainer-00000")
            print(f"the trainer is on node {home}, the hub on node {new}")
            wait_for(lambda: all(row.state == "ready" for row in run.status().cells), "all cells to be ready", 90)
        hub = new
    summary = run.end(240)
    assert summary["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(steps)


def at_once(*scenarios):
    """Scenarios that mostly wait, each with a run of its own; what one raises is raised when all have ended."""
    with ThreadPoolExecutor(len(scenarios)) as threads:
        for ending in [threads.submit(scenario) for scenario in scenarios]:
            ending.result()


def last(seconds, since, what):
    wait_for(lambda: time.monotonic() - since > seconds, what, seconds + 5)


def test_a_link_that_is_cut_for_a_minute_an_agent_s_makes_no_second_hub_and_the_hub_s_makes_one(spread):
    of_an_agent, of_the_hub = (spread(3, "steps=4000", QUIET) for _ in range(2))
    for run in (of_an_agent, of_the_hub):
        run.reach(2)
    engines = {index: of_the_hub.engines_on(index) for index in (1, 2)}
    began = time.monotonic()
    of_an_agent.net.cut(2)
    of_the_hub.net.cut(0)

    def an_agent_that_is_cut_off_claims_nothing():
        last(CUT_S, began, "the cut of one node's link")
        assert of_an_agent.epochs() == [1] and of_an_agent.hubs() == [0]
        of_an_agent.net.join(2)
        wait_for(lambda: of_an_agent.alive_nodes() == 3, "the node's return", 60)
        assert of_an_agent.epochs() == [1] and of_an_agent.hubs() == [0]

    def a_hub_that_is_cut_off_gives_way_to_the_majority_and_steps_down():
        run = of_the_hub
        found = run.hub_of_epoch(2, 60)
        # The first candidate, or on a machine that is slow with it the next one.
        (new,) = (index for index in (1, 2) if found.hub.startswith(f"{run.net.address(index)}:"))
        last(CUT_S, began, "the cut of the hub's link")
        assert run.hubs() in ([0, new], [new]) and run.epochs() == [1, 2], "the old hub may wait, and does not act"
        reached = run.step()
        run.net.join(0)
        wait_for(lambda: run.hubs() == [new], "the old hub to step down", 30)
        wait_for(lambda: run.alive_nodes() == 3, "all nodes with the new hub", 60)
        assert all(engines[index] <= run.engines_on(index) for index in engines)
        assert run.epochs() == [1, 2]
        run.reach(reached + 2)

    at_once(an_agent_that_is_cut_off_claims_nothing, a_hub_that_is_cut_off_gives_way_to_the_majority_and_steps_down)


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


def test_frozen_nodes_find_themselves_replaced_the_hub_s_and_one_in_the_middle_of_a_commit(spread):
    of_the_hub = spread(3, "steps=4000", "train.save_every=1", QUIET)
    of_the_driver = spread(3, "steps=4000", "train.save_every=1", QUIET, *SOON)

    def a_thawed_hub_steps_down():
        run = of_the_hub
        run.reach(3)
        run.freeze(0)
        run.hub_of_epoch(2, 60)
        reached = run.step()
        run.reach(reached + 5, 150)
        run.thaw(0)
        wait_for(lambda: run.hubs() in ([1], [2]), "the thawed hub to step down", 30)
        run.reach(run.step() + 5)
        numbers = [int(path.stem) for path in (run.run_dir / "commits").glob("[0-9]*.json")]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
        assert run.epochs() == [1, 2]

    def a_driver_that_wakes_up_in_the_middle_of_a_commit_commits_nothing():
        run = of_the_driver
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

    at_once(a_thawed_hub_steps_down, a_driver_that_wakes_up_in_the_middle_of_a_commit_commits_nothing)


def test_a_hub_that_is_stopped_for_a_while_loses_nobody_and_one_that_stands_still_is_started_again(spread):
    briefly, for_good = spread(2, "steps=4000", QUIET), spread(2, "steps=4000", QUIET, *SOON)
    for run in (briefly, for_good):
        run.reach(2)
    pools = ("engine-policy-0", "trainer", "driver", "executor")
    before = {pool: for_good.pids(pool) for pool in pools}
    hub = briefly.hub_pid()
    began = time.monotonic()
    for run in (briefly, for_good):
        os.kill(run.hub_pid(), signal.SIGSTOP)

    def after_20_s_nobody_is_declared_dead():
        last(20, began, "20 s without the hub's loop")
        os.kill(hub, signal.SIGCONT)
        reached = briefly.step()
        assert briefly.hub_of_epoch(1).epoch == 1 and briefly.hub_pid() == hub
        briefly.reach(reached + 3)
        assert not briefly.events("node_dead") and briefly.epochs() == [1]

    def before_any_fence_the_next_one_is_there():
        for_good.hub_of_epoch(2, 24)
        assert time.monotonic() - began > 16
        for_good.reach(for_good.step() + 3)
        assert {pool: for_good.pids(pool) for pool in pools} == before and for_good.epochs() == [1, 2]

    at_once(after_20_s_nobody_is_declared_dead, before_any_fence_the_next_one_is_there)
