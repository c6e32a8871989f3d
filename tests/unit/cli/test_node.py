"""What the first node of a job does before anything of the run is started."""

from __future__ import annotations

import errno
import signal
import socket
import threading

import pytest

from miles_hpc.cli import node
from miles_hpc.launch import first_node, preparation
from miles_hpc.launch.allocation import JobKey, Task
from miles_hpc.launch.attempts import claim_attempt
from miles_hpc.launch.job_files import exit_code_path
from miles_hpc.launch.preparation import (
    PreparationTimeout,
    Prepared,
    listening_path,
    say_prepared,
    wait_prepared,
)

pytestmark = pytest.mark.unit

TASK = Task(job=JobKey(job_id="7"), step="0", index=0, nodes=2, host="n0", hosts=("n0", "n1"))


@pytest.fixture(autouse=True)
def signals_as_before():
    """What prepares holds signals back from then on; the tests that follow in this process must get theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_whatever_goes_wrong_on_the_first_node_is_told_to_the_others(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise KeyError("an error that nobody foresaw")

    monkeypatch.setattr(node, "prepare", broken)
    arguments = node.parser().parse_args(["smoke", "--run-dir", str(tmp_path)])
    said = node._prepare_and_say(arguments, tmp_path, TASK)
    assert said.exit_code == 1 and "KeyError: 'an error that nobody foresaw'" in said.error
    assert wait_prepared(tmp_path, TASK.job, TASK.step, 5.0) == said
    assert exit_code_path(tmp_path, TASK.job).read_text() == "1\n"
    assert "Traceback" in capsys.readouterr().err


def test_a_requeued_job_continues_its_own_attempts_and_nobody_else_s(tmp_path):
    claim_attempt(tmp_path, environ={"SLURM_JOB_ID": "6"})
    assert not node.is_requeued(tmp_path, JobKey(job_id="7", restart=1)), "its first start began nothing"
    assert node.is_requeued(tmp_path, JobKey(job_id="6", restart=1))
    assert not node.is_requeued(tmp_path, JobKey(job_id="6"))


def test_a_file_system_that_loses_hold_of_the_directory_is_asked_again(tmp_path, monkeypatch):
    say_prepared(tmp_path, TASK.job, TASK.step, Prepared(run_id="r", attempt=0))
    listdir, failures = preparation.os.listdir, [errno.ESTALE, errno.EIO]

    def flaky(path):
        if failures:
            raise OSError(failures.pop(), "lost")
        return listdir(path)

    monkeypatch.setattr(preparation.os, "listdir", flaky)
    assert wait_prepared(tmp_path, TASK.job, TASK.step, 60.0).run_id == "r"


def test_a_first_node_that_does_not_begin_is_not_waited_for_as_long_as_one_that_does(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "FIRST_SIGN_S", 0.1)
    monkeypatch.setattr(preparation, "PREPARED_WITHIN_S", 0.3)
    with pytest.raises(PreparationTimeout, match=r"not begun to prepare the run within 0\.1 s: .*--prepare-timeout S"):
        wait_prepared(tmp_path, TASK.job, TASK.step)
    # One that listens nowhere has begun all the same.
    monkeypatch.setattr(first_node, "_listen", lambda nodes: None)
    with first_node.listening(listening_path(tmp_path, TASK.job, TASK.step), 2):
        with pytest.raises(PreparationTimeout, match=r"has not prepared the run within 0\.3 s"):
            wait_prepared(tmp_path, TASK.job, TASK.step)


@pytest.mark.parametrize("given_s", [0.1, 0.4])
def test_a_time_limit_that_is_given_holds_for_the_begin_of_the_first_node_too(tmp_path, monkeypatch, given_s):
    monkeypatch.setattr(preparation, "FIRST_SIGN_S", 0.2)
    for arguments, limit_s in (([], None), (["--prepare-timeout", str(given_s)], given_s)):
        parsed = node.parser().parse_args(["smoke", "--run-dir", str(tmp_path), *arguments])
        assert parsed.prepare_timeout == limit_s
    with pytest.raises(PreparationTimeout, match=rf"has not begun to prepare the run within {given_s:g} s"):
        wait_prepared(tmp_path, TASK.job, TASK.step, given_s)


def test_a_network_that_lets_no_connection_through_makes_no_first_node_seem_to_be_gone(tmp_path, monkeypatch):
    tried = threading.Event()

    def connect(*_):
        tried.set()
        raise ConnectionRefusedError

    monkeypatch.setattr(first_node.socket, "create_connection", connect)
    monkeypatch.setattr(preparation, "WORD_WITHIN_S", 0.0)
    monkeypatch.setattr(first_node, "other_addresses", lambda _: ["127.0.0.1"])
    with first_node.listening(listening_path(tmp_path, TASK.job, TASK.step), 2):
        with pytest.raises(PreparationTimeout):
            wait_prepared(tmp_path, TASK.job, TASK.step, 0.3)
    assert tried.is_set()


def test_a_connection_that_breaks_is_made_again(tmp_path, monkeypatch):
    ends, again = [threading.Event(), threading.Event()], threading.Event()
    left = iter(ends)

    def until_its_end(connection):
        end = next(left)
        if end is ends[1]:
            again.set()
        end.wait(20)
        connection.close()

    monkeypatch.setattr(first_node, "_wait_for_its_end", until_its_end)
    with socket.create_server(("127.0.0.1", 0)) as server:
        word = first_node.Listening(host="n0", addresses=["127.0.0.1"], port=server.getsockname()[1])
        first = first_node.FirstNode(word)
        ends[0].set()
        assert again.wait(20) and not first.gone.is_set()
    ends[1].set()
    assert first.gone.wait(20)
