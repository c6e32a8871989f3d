"""The hub's process is killed or stopped; the run does not notice more than a pause of its control plane."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

STEPS = "steps=30"


class Caller(threading.Thread):
    """Has the engines generate through the router every 50 ms, as a client outside of the run would."""

    BODY = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}).encode()

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.answers, self.failures = url, 0, []
        self._over = threading.Event()

    def run(self):
        while not self._over.wait(0.05):
            try:
                request = urllib.request.Request(
                    f"{self.url}/generate", self.BODY, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=20) as answer:
                    self.answers += len(json.load(answer)["output_ids"]) > 0
            except (urllib.error.URLError, OSError) as error:
                self.failures.append(repr(error))

    def end(self):
        self._over.set()
        self.join()


def router_url(run):
    cell = run.cell("router-policy-00000")
    node = next(node for node in run.status().nodes if node.node == cell.node)
    return f"http://{node.address}:{cell.workers[0].ports['http']}"


def test_a_killed_hub_is_back_in_seconds_and_nothing_else_was_touched(smoke, undisturbed):
    run = smoke(STEPS)
    run.reach(4)
    pools = ("engine-policy-0", "router-policy", "trainer", "driver", "executor", "controller", "rollout-worker")
    before = {pool: run.pids(pool) for pool in pools}
    caller = Caller(router_url(run))
    caller.start()
    for epoch in (2, 3):
        run.reach(run.step() + 2)
        os.kill(run.hub_pid(), signal.SIGKILL)
        killed = time.monotonic()
        run.hub_of_epoch(epoch)
        assert time.monotonic() - killed < 15, "under load; the figure is 5 s on a quiet machine"
        print(f"hub back after {time.monotonic() - killed:.2f} s")
    run.reach(run.step() + 3)
    assert {pool: run.pids(pool) for pool in pools} == before
    caller.end()
    assert caller.answers and not caller.failures
    summary = run.end()
    assert summary["outcome"] == "finished" and summary["cells"]["healed"] == 0, run.tail()
    assert run.ledger() == undisturbed(STEPS)


def test_a_hub_dies_at_its_birth_and_again_and_deaths_are_healed_by_the_last_one(smoke, undisturbed):
    run = smoke(STEPS)
    # At its birth, before it has said anything to anybody: nobody knows of it but the agent that started it.
    first = run.hub_pid()
    os.kill(first, signal.SIGKILL)
    run.reach(4)
    assert run.hub_pid() != first
    os.kill(run.hub_pid(), signal.SIGKILL)
    victim = "engine-policy-0-00000-00000"
    engine = run.pid(victim)
    driver = run.pid("driver-00000-00000")
    os.kill(engine, signal.SIGKILL)
    run.pid(victim, other_than=engine)
    run.kill("driver-00000-00000")
    run.pid("driver-00000-00000", other_than=driver)
    assert run.end()["outcome"] == "finished", run.tail()
    assert run.ledger() == undisturbed(STEPS)
