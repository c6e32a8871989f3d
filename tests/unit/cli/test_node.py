"""What the first node of a job does before anything of the run is started."""

from __future__ import annotations

import errno

import pytest

from miles_hpc.cli import node
from miles_hpc.launch import preparation
from miles_hpc.launch.allocation import JobKey, Task
from miles_hpc.launch.attempts import claim_attempt
from miles_hpc.launch.job_files import exit_code_path
from miles_hpc.launch.preparation import Prepared, say_prepared, wait_prepared

pytestmark = pytest.mark.unit

TASK = Task(job=JobKey(job_id="7"), step="0", index=0, nodes=2, host="n0", hosts=("n0", "n1"))


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
