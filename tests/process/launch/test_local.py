"""Local runs: started, stopped, crashed; afterwards nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from miles_hpc.agent import procfs
from miles_hpc.agent.lease import lease_path, read_lease
from miles_hpc.launch.attempts import RunIsLive, claim_attempt
from miles_hpc.launch.local import start_local

from .conftest import config_of, eventually, joined, waiting_run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def _pid_of(run, node: str, name: str) -> int:
    for process in procfs.marked(procfs.snapshot(), f"{run.attempt.run_id}/0/{node}/", str(run.run_dir)):
        if f"/{name}/" in procfs.mark_of(process.pid)[0]:
            return process.pid
    raise AssertionError(f"no {name} on {node}: {run.leftovers()}")


def test_hub_and_agents_are_up_fast_and_each_process_carries_the_marker(tmp_path):
    started = time.monotonic()
    with waiting_run(tmp_path / "fast") as run:
        assert eventually(lambda: joined(run) == 2)
        seconds = time.monotonic() - started
        assert seconds < 15, f"{seconds:.2f} s (2 s on an idle machine)"
        assert run.poll() is None
        # Two wardens, two agents, one hub; spawn shims are gone.
        assert len(run.leftovers()) == 5
        latest = run.run_dir / "logs" / "latest"
        assert latest.resolve() == run.run_dir / "logs" / "attempt-0"
        assert sorted(path.name for path in latest.iterdir()) == ["hub.jsonl", "node-00000", "node-00001"]
    assert run.leftovers() == []


def test_agents_and_hub_agree_on_what_they_have_read(run):
    from miles_hpc.agent.digest import run_digest as of_the_agent
    from miles_hpc.hub.run import run_digest as of_the_hub

    assert of_the_agent(run.run_dir) == of_the_hub(run.run_dir)


def test_stop_leaves_nothing_and_lets_the_hub_write_a_verdict(run):
    started = time.monotonic()
    run.stop("the test wants it")
    assert time.monotonic() - started < 8
    assert run.leftovers() == []
    verdict = run.poll()
    assert verdict is not None and verdict["outcome"] in ("cancelled", "failed")
    assert verdict == msgspec.json.decode(run.verdict_path.read_bytes())


def test_a_node_that_hangs_is_killed_before_the_deadline(run):
    for node in ("node-00000", "node-00001"):
        os.kill(_pid_of(run, node, "agent"), signal.SIGSTOP)
    started = time.monotonic()
    run.stop("the test wants it", deadline_s=2)
    assert time.monotonic() - started < 10
    assert run.leftovers() == []


def test_a_hub_that_is_killed_is_started_again_and_the_agents_stay(run):
    agents = [_pid_of(run, node, "agent") for node in ("node-00000", "node-00001")]
    os.kill(_pid_of(run, "node-00000", "hub"), signal.SIGKILL)
    assert eventually(lambda: joined(run, epoch=2) == 2), run.poll()
    assert [_pid_of(run, node, "agent") for node in ("node-00000", "node-00001")] == agents
    assert run.poll() is None


def test_a_hub_that_is_killed_again_and_again_ends_the_run_with_its_reason(run):
    for epoch in range(1, 7):
        assert eventually(lambda epoch=epoch: joined(run, epoch=epoch) == 2, 20), run.poll()
        os.kill(_pid_of(run, "node-00000", "hub"), signal.SIGKILL)
    verdict = run.wait(40)
    assert verdict is not None
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 1)
    assert "the hub ended by signal 9 without a verdict" in verdict["reason"] and "5 times" in verdict["reason"]
    assert run.leftovers() == []


def test_the_first_agent_s_death_gives_the_run_a_new_hub_that_all_nodes_find(run):
    other = _pid_of(run, "node-00001", "agent")
    os.kill(_pid_of(run, "node-00000", "agent"), signal.SIGKILL)
    assert eventually(lambda: joined(run, epoch=2) == 2), run.poll()
    assert run.poll() is None
    assert _pid_of(run, "node-00001", "agent") == other


def test_a_node_whose_agent_is_killed_rejoins_the_same_hub(run):
    hub, before = _pid_of(run, "node-00000", "hub"), _pid_of(run, "node-00001", "agent")
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: joined(run, anew=True) == 3), run.poll()
    assert _pid_of(run, "node-00001", "agent") != before
    assert _pid_of(run, "node-00000", "hub") == hub and run.poll() is None


def test_a_warden_that_is_killed_takes_its_node_along_and_another_node_has_the_hub(run):
    lease = lease_path(run.run_dir, 0)
    # A hub that dies in its first second has no successor: the others know neither lease nor roster yet.
    assert eventually(lambda: lease.exists() and read_lease(lease).counter >= 2)
    run.nodes[0].warden.kill()
    assert eventually(lambda: not any("/node-00000/" in text for _, text in marks(run)), 15)
    assert eventually(lambda: any("/node-00001/" in text and "/hub/" in text for _, text in marks(run)), 25)
    assert run.poll() is None


def marks(run) -> list[tuple[int, str]]:
    return [(pid, procfs.mark_of(pid)[0]) for pid, _ in run.leftovers()]


def test_wait_without_a_verdict_returns_after_its_timeout(run):
    started = time.monotonic()
    assert run.wait(0.3) is None
    assert time.monotonic() - started < 10
    assert len(run.alive()) == 2


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_a_run_ends_with_the_command_that_started_it(tmp_path, signum):
    run_dir = tmp_path / "run"
    code = f"""
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started under
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from conftest import eventually, joined, waiting_run
with waiting_run(Path({str(run_dir)!r})) as run:
    assert eventually(lambda: joined(run) == 2)
    print("up", flush=True)
    signal.pause()
"""
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None and command.stdout.readline() == "up\n"

    def left() -> list[procfs.Process]:
        return procfs.marked(procfs.snapshot(), "run/0/", str(run_dir))

    assert len(left()) == 5
    with pytest.raises(RunIsLive, match=f"pid {command.pid}"):
        claim_attempt(run_dir, resume=True)
    command.send_signal(signum)
    command.wait()
    assert eventually(lambda: left() == [], 10), left()
    # The next attempt may start at once.
    assert claim_attempt(run_dir, resume=True).number == 1


def test_two_runs_at_once_do_not_disturb_each_other(run, tmp_path):
    with waiting_run(tmp_path / "elsewhere" / run.run_dir.name) as twin:
        assert eventually(lambda: joined(twin) == 2)
        assert twin.attempt.run_id == run.attempt.run_id
        for node in twin.nodes:
            node.warden.kill()
        assert twin.wait(15) is not None
        assert twin.leftovers() == []
    assert run.poll() is None
    assert len(run.leftovers()) == 5


def test_a_run_is_started_by_the_main_thread_only(tmp_path):
    attempt = claim_attempt(tmp_path)
    caught = []

    def start() -> None:
        try:
            start_local(config_of(1), tmp_path, attempt)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "main thread" in caught[0]
