"""The verbs that look at a run and steer it, against the real hub and agents; the programs are stubs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess

import psutil
import pytest

from .conftest import COMMAND, running, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]

CELL = "engine-policy-0-00001"


def asked(place, *words):
    done = place.call(*words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def cell_row(place, cell=CELL):
    return next(row for row in asked(place, "cells") if row["cell"] == cell)


def hub_pid(place):
    return int(json.loads((place.run_dir / "status.json").read_text())["hub"].rpartition(" ")[2])


@contextlib.contextmanager
def frozen(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_run_is_looked_at_by_directory_by_id_and_as_the_only_one(place):
    with running(place):
        for name in ([], ["run"], [str(place.run_dir)]):
            nodes = asked(place, "nodes", *name)
            assert [(node["node"], node["state"]) for node in nodes] == [
                ("node-00000", "alive"),
                ("node-00001", "alive"),
            ]
            assert all(node["pid"] and node["silent_s"] < 5 for node in nodes)
        assert "node-00001  alive" in place.call("nodes").stdout
        events = place.call("events", "-n", "1000", "--json")
        names = [json.loads(line)["event"] for line in events.stdout.splitlines()]
        assert names[0] == "hub_started" and "all_ready" in names and events.stderr == ""
        assert len(place.call("events", "run", "-n", "3").stdout.splitlines()) == 3
        dump = asked(place, "dump")
        assert {"status", "counters", "threads", "clients", "nodes", "cells"} <= set(dump)
        assert "MainThread" in dump["threads"] and len(dump["nodes"]) == 2


def test_a_cell_is_stopped_started_and_restarted_while_everything_else_goes_on(place):
    with running(place):
        before = {row["cell"]: row for row in asked(place, "cells")}
        (pid,) = [worker["pid"] for worker in before[CELL]["workers"]]
        assert asked(place, "stop", CELL, "--reason", "too hot")["state"] == "stopped"
        assert not psutil.pid_exists(pid) and cell_row(place)["workers"] == []
        assert asked(place, "start", CELL)["state"] == "ready"
        again = place.call("restart", CELL, "run")
        assert again.returncode == 0 and f"{CELL} g1-3" in again.stdout and "ready" in again.stdout
        after = {row["cell"]: row for row in asked(place, "cells")}
        assert {cell for cell in after if after[cell] != before[cell]} == {CELL}
        lines = place.call("events", "-n", "1000", "--json").stdout.splitlines()
        said = [row for row in map(json.loads, lines) if row["event"].startswith("operator_")]
        assert [row["event"] for row in said] == [
            "operator_stops_cell",
            "operator_starts_cell",
            "operator_restarts_cell",
        ]
        assert said[0]["reason"] == "too hot"
        for word, text in (("engine-policy-0-0001", "did you mean engine-policy-0-00001"), ("driver-00000", "drain")):
            refused = place.call("stop", word)
            assert refused.returncode == 2 and text in refused.stderr and refused.stderr.count("\n") == 1


def test_where_the_hub_does_not_answer_files_do_and_say_how_old_they_are(place):
    with (place.path / "my.toml").open("a") as file:
        # Its agent must not put another hub in the frozen one's place before all verbs were tried.
        file.write("hub_stall = 200.0\nfence = 300.0\nhub_grace = 400.0\n")
    with running(place), frozen(hub_pid(place)):
        for words in (["status"], ["cells"], ["nodes"]):
            done = place.call(*words, "--json")
            assert done.returncode == 0 and json.loads(done.stdout)
            assert "the hub was not reached" in done.stderr and "status.json, " in done.stderr
            assert done.stderr.rstrip().endswith("s old")
        assert json.loads(place.call("status", "--json").stdout)["age_s"] > 1
        events = place.call("events")
        assert "all_ready" in events.stdout and "hub.jsonl, " in events.stderr
        logs = place.call("logs", "hub")
        assert "all_ready" in logs.stdout and "hub.jsonl, " in logs.stderr
        for words in (["stop", CELL, "--timeout", "2"], ["dump"]):
            done = place.call(*words)
            assert done.returncode == 1 and "the hub was not reached" in done.stderr and done.stderr.count("\n") == 1


def test_logs_follow_a_cell_over_its_restart_to_the_verdict(place):
    stub = place.path / "stub-python"
    hello = '[ -n "$MILES_HPC_WORKER" ] && echo "hello from $MILES_HPC_WORKER g$MILES_HPC_GENERATION"\nexec '
    stub.write_text(stub.read_text().replace("exec ", hello))
    with running(place) as run:
        assert place.call("logs", CELL).stdout == f"hello from {CELL}-00000 g1-1\n"
        rows = [json.loads(line) for line in place.call("logs", "engine-policy-0", "--json").stdout.splitlines()]
        assert {(row["name"], row["generation"]) for row in rows} == {
            ("engine-policy-0-00000-00000", "1-1"),
            (f"{CELL}-00000", "1-1"),
        }
        everything = place.call("logs", "run").stdout
        assert f"{CELL}-00000 | hello" in everything and "hub | " in everything
        unknown = place.call("logs", "engine")
        assert unknown.returncode == 2 and "there is controller-00000" in unknown.stderr
        follow = subprocess.Popen(
            [*COMMAND, "logs", CELL, "-f"], cwd=place.path, env=place.env, stdout=subprocess.PIPE, text=True
        )
        try:
            assert follow.stdout.readline() == f"hello from {CELL}-00000 g1-1\n"
            assert asked(place, "restart", CELL)["state"] == "ready"
            assert f"hello from {CELL}-00000 g1-2" in follow.stdout.readline()
            run.send_signal(signal.SIGINT)
            follow.communicate(timeout=60)
            assert follow.returncode == 0
        finally:
            follow.kill()
            follow.wait()
        until(lambda: run.poll() is not None)
    assert "hello from" in place.call("logs", CELL, str(place.run_dir)).stdout
    ended = place.call("status", str(place.run_dir))
    assert "cancelled" in ended.stdout and "has ended" in ended.stderr
