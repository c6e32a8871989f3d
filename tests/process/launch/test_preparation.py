"""Two nodes of a job as processes of this machine: what the other one sees when the first ends while it prepares."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles_hpc.launch.allocation import JobKey
from miles_hpc.launch.job_files import exit_code_path
from miles_hpc.launch.preparation import listening_path

pytestmark = pytest.mark.process

JOB = JobKey(job_id="7")
PROGRAM = """
import os, signal, sys, time
from miles_hpc.cli import node
from miles_hpc.cli.apart import apart
from miles_hpc.launch import first_node, preparation
first_node.other_addresses = lambda _: ["127.0.0.1"]
preparation.WORD_WITHIN_S = 1.0

def stall(module, name):
    real = getattr(module, name)
    def stalled(*args):
        print("stalls", flush=True)
        sys.stdin.readline()
        return real(*args)
    setattr(module, name, stalled)

def prepare(*_):
    print("prepares", flush=True)
    PREPARE

def become_warden(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    print("pending", signal.sigpending() == {signal.SIGTERM}, flush=True)
    sys.exit(0)

node.prepare, node.become_warden = prepare, become_warden
sys.exit(node.main(sys.argv[1:]))
"""


@pytest.fixture
def node(tmp_path):
    """Starts one node's program, as srun would; `prepare` is what the first one does."""
    started = []
    (tmp_path / "run").mkdir()

    def start(index, prepare="apart(time.sleep, 120)"):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("PREPARE", prepare), "--run-dir", str(tmp_path / "run")],
            env={
                **os.environ,
                **{"SLURM_JOB_ID": "7", "SLURM_NODEID": str(index), "SLURM_STEP_ID": "0"},
                **{"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n0,n1"},
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def eventually(probe, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not (found := probe()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def has_socket(process, status):
    """Whether a process has a TCP socket in this state: one that LISTENs has one, as has who has found it."""
    return any(one.status == status for one in psutil.net_connections("tcp") if one.pid == process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize("child_first", [True, False])
def test_a_signal_while_the_first_node_prepares_is_told_to_all_nodes_and_to_the_batch_script(
    node, tmp_path, number, child_first
):
    first, other = node(0), node(1)
    assert first.stdout.readline() == "prepares\n"
    (child,) = eventually(psutil.Process(first.pid).children)
    # Slurm signals every process of a step, in whatever order.
    for pid in (child.pid, first.pid) if child_first else (first.pid, child.pid):
        with contextlib.suppress(ProcessLookupError):  # the first one has made an end of its child
            os.kill(pid, number)
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 75 and f"miles-hpc: drained: {number.name} came while n0 prepared the run" in said, said
    assert other.wait(60) == 75
    assert exit_code_path(tmp_path / "run", JOB).read_text() == "75\n"
    assert not child.is_running()


def test_a_signal_to_a_node_that_waits_is_told(node):
    other = node(1)
    eventually(lambda: "SIGUSR2" in caught(other.pid))
    other.send_signal(signal.SIGUSR2)
    assert "drained: SIGUSR2 came to n1 while it waited" in other.communicate(timeout=60)[1]
    assert other.returncode == 75


def caught(pid):
    """Names of the signals that a process handles."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return {signal.Signals(number).name for number in range(1, 32) if mask >> (number - 1) & 1}


def test_a_first_node_that_is_killed_while_it_prepares_costs_the_others_seconds(node, tmp_path):
    first, other = node(0), node(1)
    assert first.stdout.readline() == "prepares\n"
    eventually(lambda: has_socket(other, "ESTABLISHED"))
    (child,) = eventually(psutil.Process(first.pid).children)
    first.kill()  # what its child would not survive in a job: Slurm ends the task
    said = other.communicate(timeout=60)[1]
    child.kill()
    assert other.returncode == 1 and "has ended while it prepared the run" in said, said
    assert exit_code_path(tmp_path / "run", JOB).read_text() == "1\n"


@pytest.mark.parametrize(
    "prepare, code",
    [
        ('stall(os, "fsync"); return preparation.Prepared(run_id="r", attempt=0)', 0),
        ('stall(os, "fsync"); raise RuntimeError("no such model")', 1),
        ('stall(node, "write_exit_code"); raise RuntimeError("no such model")', 1),
    ],
)
def test_a_first_node_whose_word_is_held_up_by_its_file_system_is_not_taken_for_one_that_has_ended(
    node, tmp_path, prepare, code
):
    first, other = node(0, prepare), node(1)
    assert [first.stdout.readline(), first.stdout.readline()] == ["prepares\n", "stalls\n"]
    assert has_socket(first, "LISTEN")
    if "fsync" in prepare:
        eventually(lambda: has_socket(other, "ESTABLISHED"))
    first.communicate("\n", timeout=60)
    said = other.communicate(timeout=60)[1]
    assert (first.returncode, other.returncode) == (code, code), said
    assert exit_code_path(tmp_path / "run", JOB).exists() == bool(code)


def test_what_the_first_node_has_prepared_is_taken_over_and_signals_are_left_to_the_warden(node, tmp_path):
    other = node(1)
    first = node(0, 'return preparation.Prepared(run_id="r", attempt=0)')
    for process in (first, other):
        said = process.communicate(timeout=60)
        assert process.returncode == 0 and "pending True" in said[0], said
    assert listening_path(tmp_path / "run", JOB, "0").exists()
