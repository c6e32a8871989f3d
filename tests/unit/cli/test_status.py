"""What `status`, `nodes` and `cells` say of a run whose hub cannot be asked."""

from __future__ import annotations

import json
import os
import re
import time

import msgspec
import pytest

from miles_hpc.agent.procfs import boot_id
from miles_hpc.cli.main import main
from miles_hpc.launch.attempts import Attempt

pytestmark = pytest.mark.unit

STATUS = {
    "run_id": "r",
    "attempt": 0,
    "epoch": 1,
    "hub": "host pid 5",
    "step": 2,
    "weight_version": 3,
    "nodes": [
        {"node": "node-00000", "host": "h", "address": "127.0.0.2", "state": "alive", "silent_s": 0.1, "pid": 6}
    ],
    "cells": [
        {"cell": "engine-00000", "pool": "engine", "node": "node-00000", "generation": [1, 1], "state": "ready",
         "workers": [{"pid": 7}], "restarts": 0}
    ],
    "outcome": "",
    "draining": "",
    "dropped": {},
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Writes the files of a run whose starting command, on this machine, is gone."""
    (tmp_path / "attempts").mkdir()
    (tmp_path / "verdicts").mkdir()

    def write(verdict=None, attempt=0, **status):
        claim = Attempt(
            number=attempt, run_id="r", host=os.uname().nodename, boot=boot_id(), pid=os.getpid(), pid_start=1,
            started=time.time() - 100,
        )  # fmt: skip
        (tmp_path / "attempts" / f"{attempt}.json").write_bytes(msgspec.json.encode(claim))
        content = {**STATUS, "written_at": time.time() - 30, **status}
        (tmp_path / "status.json").write_text(json.dumps(content))
        if verdict:
            (tmp_path / "verdicts" / f"attempt-{attempt}.json").write_text(json.dumps(verdict))
        return str(tmp_path)

    return write


def shown(capsys, *words) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_a_run_that_died_without_a_verdict_is_said_to_be_dead(write, capsys):
    run = write()
    text = shown(capsys, "status", run)
    assert "running" not in text and "lost, step 2, weight version 3" in text
    assert f"died without a verdict: nothing of it lives: the command that started it (pid {os.getpid()})" in text
    assert re.search(r"it was last heard of [34]\d s ago", text)
    for verb in ("nodes", "cells"):
        text = shown(capsys, verb, run)
        assert text.startswith("died without a verdict") and "ready" not in text and "alive" not in text
    found = json.loads(shown(capsys, "status", run, "--json"))
    assert (found["state"], found["outcome"], found["source"]) == ("lost", "", "status.json")
    assert "are gone" in found["reason"] and 29 < found["age_s"] < 60
    assert [found["nodes"][0]["state"], found["cells"][0]["state"]] == ["dead", "lost"]
    assert json.loads(shown(capsys, "cells", run, "--json"))[0]["state"] == "lost"


def test_a_verdict_speaks_where_the_last_status_does_not_know_it(write, capsys):
    run = write(verdict={"outcome": "cancelled", "reason": "cancelled by SIGINT"})
    assert "cancelled, step 2" in shown(capsys, "status", run)
    found = json.loads(shown(capsys, "status", run, "--json"))
    assert (found["state"], found["outcome"], found["reason"]) == ("cancelled", "cancelled", "cancelled by SIGINT")
    assert found["cells"][0]["state"] == "lost"


def test_a_status_of_an_earlier_attempt_is_not_taken_for_that_of_the_newest(write, capsys):
    write()
    run = write(attempt=1)
    text = shown(capsys, "status", run)
    assert "lost, step 2" in text and "attempt 1 has written no status yet" in text
    assert json.loads(shown(capsys, "cells", run, "--json"))[0]["state"] == "lost"


def test_a_run_without_a_status_is_one_line_on_stderr(write, capsys, tmp_path):
    run = write()
    (tmp_path / "status.json").unlink()
    assert main(["status", run, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "has not written a status yet" in err and "are gone" in err


def test_messages_to_those_who_left_do_not_read_as_a_fault(write, capsys):
    run = write(verdict={"outcome": "drained"}, dropped={"unroutable": 9})
    text = shown(capsys, "status", run)
    assert "did not get through" not in text and "to programs that had left: 9 (as it should be" in text
    run = write(verdict={"outcome": "drained"}, dropped={"unroutable": 9, "malformed": 2})
    assert "messages that did not get through: malformed 2\n" in shown(capsys, "status", run)
    assert json.loads(shown(capsys, "status", run, "--json"))["dropped"] == {"unroutable": 9, "malformed": 2}
