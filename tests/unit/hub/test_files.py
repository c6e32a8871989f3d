"""Verdict, summary, status file and log."""

import io
import json
import logging
import threading

import pytest

from miles_hpc.agent.log import JsonLog
from miles_hpc.hub import verdict as verdict_module
from miles_hpc.hub.actions import WriteVerdict
from miles_hpc.hub.eventlog import EventLog
from miles_hpc.hub.summary import merged_summary
from miles_hpc.hub.verdict import FileWriter, write_verdict

pytestmark = pytest.mark.unit


def a_verdict(**changes) -> WriteVerdict:
    values = {"outcome": "finished", "reason": "", "exit_code": 0, "summary": {"outcome": "finished", "attempt": 0}}
    return WriteVerdict(**{**values, **changes})


def counted(**changes):
    values = {
        "outcome": "finished",
        "reason": "",
        "exit_code": 0,
        "attempt": 2,
        "step": 5,
        "weight_version": 6,
        "started": 11,
        "healed": 1,
        "ready": 1.5,
        "first_step": 3.0,
        "total": 20.0,
    }
    return {**values, **changes}


def test_the_first_verdict_of_an_attempt_stands(tmp_path):
    assert write_verdict(tmp_path, 0, a_verdict())
    assert not write_verdict(tmp_path, 0, a_verdict(summary={"outcome": "failed"}))
    assert json.loads((tmp_path / "verdicts" / "attempt-0.json").read_text())["outcome"] == "finished"
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "finished"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["attempt-0.json", "summary.json"]


def test_an_old_attempt_does_not_replace_the_summary_of_a_newer_one(tmp_path):
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "1.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"attempt": 1}')
    assert write_verdict(tmp_path, 0, a_verdict())
    assert json.loads((tmp_path / "summary.json").read_text()) == {"attempt": 1}


def test_a_summary_without_a_driver_has_the_whole_schema():
    summary = merged_summary({}, **counted())
    assert summary == {
        "outcome": "finished",
        "reason": "",
        "exit_code": 0,
        "attempt": 2,
        "steps": 5,
        "weight_version": 6,
        "reward": {"first": None, "last": None, "best": None},
        "heldout": {"first": None, "last": None},
        "groups": {"dispatched": 0, "committed": 0, "returned": 0, "dropped": {}},
        "cells": {"started": 11, "healed": 1},
        "seconds": {"ready": 1.5, "first_step": 3.0, "total": 20.0},
    }


def test_what_is_in_flight_at_the_verdict_is_returned_so_that_the_groups_add_up():
    counts = {"dispatched": 24, "committed": 8, "returned": 1, "dropped": {"lost": 2}, "in_flight": 13}
    groups = merged_summary({"groups": counts}, **counted())["groups"]
    assert groups == {"dispatched": 24, "committed": 8, "returned": 14, "dropped": {"lost": 2}}


def test_the_drivers_part_completes_the_summary_and_cannot_rewrite_the_hubs():
    driver = {
        "steps": 20,
        "outcome": "failed",
        "cells": {"healed": 9},
        "groups": {"dispatched": 8, "committed": 7, "returned": 1},
        "seconds": {"total": 1.0, "rollout": 4.0},
        "extra": [1],
    }
    summary = merged_summary(driver, **counted())
    assert summary["steps"] == 20 and summary["outcome"] == "finished" and summary["extra"] == [1]
    assert summary["cells"] == {"started": 11, "healed": 1}
    assert summary["groups"] == {"dispatched": 8, "committed": 7, "returned": 1, "dropped": {}}
    assert summary["seconds"] == {"ready": 1.5, "first_step": 3.0, "total": 20.0, "rollout": 4.0}


def test_a_stalled_file_system_stalls_no_caller_and_only_the_newest_status_is_kept(tmp_path, monkeypatch):
    stalled, written, real = threading.Event(), [], verdict_module._replace

    def slow(target, content):
        stalled.wait(10)
        written.append(json.loads(content))
        real(target, content)

    monkeypatch.setattr(verdict_module, "_replace", slow)
    writer = FileWriter(tmp_path, 0, lambda result: None)
    for n in range(100):
        writer.write_status({"n": n})
    stalled.set()
    writer.close(5.0)
    assert len(written) <= 2 and written[-1] == {"n": 99}
    assert json.loads((tmp_path / "status.json").read_text()) == {"n": 99}


def test_a_verdict_is_reported_and_a_failure_to_write_it_too(tmp_path):
    results: list[object] = []
    for place in (tmp_path, tmp_path / "verdicts" / "attempt-0.json"):
        writer = FileWriter(place, 0, results.append)
        writer.write_verdict(a_verdict())
        writer.close(5.0)
    assert results[0] is True and isinstance(results[1], OSError)


def test_a_status_that_cannot_be_written_is_counted_and_ends_nothing(tmp_path):
    writer = FileWriter(tmp_path / "gone", 0, lambda result: None)
    writer.write_status({"n": 1})
    writer.close(5.0)
    assert writer.status_failures == 1


def test_log_lines_are_json_with_one_schema_and_short_text_for_people(tmp_path):
    people = io.StringIO()
    log = EventLog(tmp_path / "logs" / "hub.jsonl", people)
    log.write("cell_ready", cell="engine-00000", generation="1-1")
    record = logging.LogRecord("zap", logging.WARNING, "f", 1, "key %s", ("k",), None)
    log.handler().emit(record)
    log.close()
    first, second = [json.loads(line) for line in (tmp_path / "logs" / "hub.jsonl").read_text().splitlines()]
    assert first.pop("time") > 1e9
    assert first == {
        "level": "info",
        "source": "hub",
        "event": "cell_ready",
        "cell": "engine-00000",
        "generation": "1-1",
    }
    assert (second["level"], second["event"], second["text"]) == ("warning", "log", "key k")
    assert "INFO hub cell_ready cell=engine-00000" in people.getvalue()


def test_a_journal_that_somebody_waits_for_is_reported_when_it_is_on_disk(tmp_path, monkeypatch):
    synced, kept, done = [], [], threading.Event()
    monkeypatch.setattr(verdict_module.os, "fsync", synced.append)

    def on_kept(ticket, error):
        kept.append((ticket, error, (tmp_path / "journal" / "j.json").read_bytes(), len(synced)))
        done.set()

    writer = FileWriter(tmp_path, 0, lambda result: None, on_kept=on_kept)
    writer.write_journal(tmp_path / "journal" / "j.json", b"old")
    writer.write_journal(tmp_path / "journal" / "j.json", b"new", 7)
    assert done.wait(10)
    writer.close()
    assert kept == [(7, "", b"new", 2)], "the file and its directory"


def test_a_journal_that_nobody_waits_for_costs_no_fsync(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(verdict_module.os, "fsync", synced.append)
    writer = FileWriter(tmp_path, 0, lambda result: None)
    writer.write_journal(tmp_path / "journal" / "j.json", b"{}")
    writer.close()
    assert (tmp_path / "journal" / "j.json").read_bytes() == b"{}" and not synced


def test_who_waits_for_a_journal_that_cannot_be_written_hears_why(tmp_path):
    (tmp_path / "journal").write_text("in the way")
    kept, done = [], threading.Event()

    def on_kept(ticket, error):
        kept.append((ticket, error))
        done.set()

    writer = FileWriter(tmp_path, 0, lambda result: None, on_kept=on_kept)
    writer.write_journal(tmp_path / "journal" / "j.json", b"{}", 3)
    assert done.wait(10)
    writer.close()
    ((ticket, why),) = kept
    assert ticket == 3 and "journal" in why and writer.status_failures == 1


def test_agents_and_hubs_write_lines_of_one_schema(tmp_path):
    hub, agent = EventLog(tmp_path / "hub.jsonl", io.StringIO()), JsonLog(tmp_path / "agent.jsonl", "node-00000")
    for log in (hub, agent):
        log.write("worker_exited", "info", worker="w", generation="1-2", pid=7)
        log.close()
    (of_hub,), (of_agent,) = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("hub.jsonl", "agent.jsonl")
    )
    assert list(of_hub) == list(of_agent) == ["time", "level", "source", "event", "worker", "generation", "pid"]
    assert {key: type(value) for key, value in of_hub.items()} == {key: type(value) for key, value in of_agent.items()}
    assert (of_hub["source"], of_agent["source"]) == ("hub", "node-00000")
