"""The verbs that look at a run and steer it, against the real hub and agents; the programs are stubs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess

import psutil
import pytest

from miles_hpc import __version__

from .conftest import COMMAND, running, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

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
        for node in dump["nodes"]:
            assert node["interface"] == "lo"
            assert node["versions"] == {
                "miles_hpc": __version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
            }


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


@contextlib.contextmanager
def no_route(place):
    """The hub lives, and nothing gets to its address from here."""
    path = next((place.run_dir / "rendezvous" / "0").glob("epoch-*.json"))
    before, draft = path.read_text(), place.path / "draft"
    try:
        draft.write_text(json.dumps({**json.loads(before), "addresses": ["192.0.2.1"]}))
        draft.replace(path)
        yield
    finally:
        draft.write_text(before)
        draft.replace(path)


def test_every_verb_answers_as_json(place):
    with running(place):
        status = asked(place, "status")
        assert (status["state"], status["outcome"], status["source"], status["draining"]) == ("running", "", "hub", "")
        assert status["age_s"] == 0 and len(asked(place, "nodes")) == 2 and len(asked(place, "cells")) == 11
        for words in (["logs", "hub", "-n", "2"], ["events", "-n", "2"]):
            done = place.call(*words, "--json")
            assert done.returncode == 0 and len([json.loads(line) for line in done.stdout.splitlines()]) == 2
        for verb, state in (("stop", "stopped"), ("start", "ready"), ("restart", "ready")):
            assert asked(place, verb, CELL)["state"] == state
        assert asked(place, "dump")["nodes"]
        drained = asked(place, "drain", "run", "--reason", "lunch", "--wait")
        assert (drained["run_dir"], drained["outcome"]) == (str(place.run_dir), "drained")
        assert "lunch" in drained["reason"]
        ended = json.loads(place.call("status", "run", "--json").stdout)
        assert (ended["state"], ended["outcome"], ended["source"]) == ("drained", "drained", "status.json")
        assert place.call("drain", "run", "--json").returncode == 2


@pytest.mark.parametrize("silent", ["frozen", "no route"])
def test_where_the_hub_does_not_answer_files_do_and_say_how_old_they_are(place, silent):
    with (place.path / "my.toml").open("a") as file:
        # Its agent must not put another hub in the frozen one's place before all verbs were tried.
        file.write("hub_stall = 400.0\nfence = 500.0\nhub_grace = 600.0\n")
    with running(place), frozen(hub_pid(place)) if silent == "frozen" else no_route(place):
        for words in (["status"], ["cells"], ["nodes"]):
            done = place.call(*words, "--json")
            assert done.returncode == 0 and json.loads(done.stdout)
            assert "the hub was not reached" in done.stderr and "status.json, " in done.stderr
            assert done.stderr.rstrip().endswith("s old")
        status = json.loads(place.call("status", "--json").stdout)
        assert (status["state"], status["source"]) == ("running", "status.json")
        assert status["age_s"] > 1 or silent == "no route"
        events = place.call("events", "--json")
        assert "all_ready" in [json.loads(line)["event"] for line in events.stdout.splitlines()]
        assert "hub.jsonl, " in events.stderr and place.call("events", "-n", "0").stdout == ""
        logs = place.call("logs", "hub", "--json")
        assert "all_ready" in logs.stdout and "hub.jsonl, " in logs.stderr
        for words in (
            *([verb, CELL, "--timeout", "2"] for verb in ("stop", "start", "restart")),
            ["dump"],
            ["drain", "run"],
        ):
            done = place.call(*words, "--json")
            assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
            assert "the hub was not reached" in done.stderr or "its hub does not answer" in done.stderr


def test_a_run_that_is_killed_whole_is_said_to_be_dead_and_ends_those_who_follow_it(place):
    with running(place) as run, contextlib.ExitStack() as followers:
        follow = []
        for words in (["logs", "hub", "-f"], ["events", "-f"]):
            process = subprocess.Popen(
                [*COMMAND, *words], cwd=place.path, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            followers.callback(process.wait)
            followers.callback(process.kill)
            process.stdout.readline()
            follow.append(process)
        # Stopped first, as nothing of it may see the rest die and write a verdict.
        whole = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        for process in whole:
            process.suspend()
        for process in whole:
            process.kill()
        for process in follow:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1 and "attempt 0 died without a verdict: the command" in err, err
            assert "are gone" in err
        text = place.call("status", "run").stdout
        assert "died without a verdict: nothing of it lives" in text and "running" not in text
        found = json.loads(place.call("status", "run", "--json").stdout)
        assert (found["state"], {row["state"] for row in found["cells"]}) == ("lost", {"lost"})
        nobody = place.call("status")
        assert nobody.returncode == 2 and "no run is going on here (the newest was run)" in nobody.stderr


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
