"""Events are given once each and none is left out, whoever tells them and whatever the clocks do."""

from __future__ import annotations

import argparse
import json

import pytest

from miles_hpc.cli import events
from miles_hpc.cli.events import Follower
from miles_hpc.cli.signs import Sign
from miles_hpc.hub.eventlog import EventLog
from miles_hpc.launch.attempts import claim_attempt
from miles_hpc.launch.job_states import Life
from miles_hpc.wire.sockets import HubUnreachable

pytestmark = pytest.mark.unit


class Hub:
    """A hub's events and the log that all hubs write."""

    def __init__(self, log) -> None:
        self.log, self.lines, self.answers = log, [], True
        self.log.touch()

    def says(self, *lines: dict) -> None:
        self.lines += lines
        with self.log.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def restarts(self) -> None:
        self.lines = []

    def ask(self, since: int, limit: int):
        if not self.answers:
            raise HubUnreachable("no route")
        following = len(self.lines)
        wanted = min(limit, max(0, following - since))
        return self.lines[following - wanted :], following


def line(event: object, time: float = 1.0) -> dict:
    return {"time": time, "event": f"{event}"}


def names(follower: Follower) -> list[str]:
    return [found["event"] for found in follower.new()]


@pytest.fixture
def hub(tmp_path) -> Hub:
    return Hub(tmp_path / "hub.jsonl")


@pytest.fixture
def follower(hub) -> Follower:
    return Follower(hub.ask, hub.log)


def test_a_clock_that_goes_back_hides_nothing(hub, follower):
    hub.says(line("a", 1000.0), line("b", 1001.0))
    assert names(follower) == ["a", "b"]
    hub.says(line("c", 5.0))
    assert names(follower) == ["c"] and names(follower) == []
    hub.says(line("verdict", 6.0), line("verdict", 7.0))
    assert names(follower) == ["verdict", "verdict"]


def test_a_hub_that_takes_over_numbers_anew(hub, follower):
    hub.says(*(line(n, n) for n in range(5)))
    assert len(names(follower)) == 5
    hub.says(line("last words", 5.0))
    hub.restarts()
    hub.says(line("hub_started", 3.0))
    assert names(follower) == ["last words", "hub_started"]
    hub.says(line("next", 4.0))
    assert names(follower) == ["next"]
    hub.restarts()
    # It has said more than the one before by now.
    hub.says(*(line(f"new {n}", n) for n in range(9)))
    assert len(names(follower)) == 9 and names(follower) == []


def test_what_a_hub_said_after_its_log_was_read_comes_before_what_the_next_one_says(hub, follower):
    hub.answers = False
    hub.says(line("a"))
    assert names(follower) == ["a"]
    hub.says(line("b"))
    hub.restarts()
    hub.answers = True
    hub.says(line("c"))
    assert names(follower) == ["b", "c"] and names(follower) == []


def test_a_log_that_lags_behind_a_new_hub_hides_and_repeats_nothing(hub, follower):
    hub.says(line("a"))
    assert names(follower) == ["a"]
    hub.restarts()
    hub.says(line("b"))
    hub.lines.append(line("c"))
    assert names(follower) == ["b", "c"]
    hub.answers = False
    hub.says(line("c"), line("d"))
    assert names(follower) == ["d"]


def test_hub_and_log_go_on_from_each_other(hub, follower):
    hub.says(line("a"), line("b"))
    assert names(follower) == ["a", "b"]
    hub.answers = False
    assert names(follower) == [] and follower.why_no_hub == "no route"
    hub.says(line("c"))
    assert names(follower) == ["c"]
    hub.answers = True
    hub.says(line("d"))
    assert names(follower) == ["d"] and follower.why_no_hub == ""
    hub.answers = False
    hub.restarts()
    hub.says(line("e"))
    assert names(follower) == ["e"]
    hub.answers = True
    assert names(follower) == []


@pytest.mark.parametrize("answers", [True, False])
def test_what_lies_before_the_first_look_is_not_given_later(hub, follower, answers):
    hub.says(*(line(n) for n in range(9)))
    assert [found["event"] for found in follower.new(limit=1)][-1:] == ["8"]
    hub.answers = answers
    assert names(follower) == []
    hub.says(line("next"))
    assert names(follower) == ["next"]


def test_more_than_the_hub_keeps_comes_from_its_log(hub, follower):
    hub.says(line("first"))
    assert names(follower) == ["first"]
    hub.says(*(line(n) for n in range(3000)))
    found = names(follower)
    assert len(found) == 3000 and found[-1] == "2999" and names(follower) == []


def test_an_event_of_the_hub_is_the_same_in_its_log(tmp_path):
    log = EventLog(tmp_path / "hub.jsonl", stderr=(tmp_path / "stderr").open("w"))
    log.write("odd", path=tmp_path, share=0.1, none=None, many=(1, 2))
    log.write("next")
    answers = True

    def ask(since, limit):
        if not answers:
            raise HubUnreachable("")
        return log.recent(since, limit)

    follower = Follower(ask, tmp_path / "hub.jsonl")
    assert names(follower) == ["odd", "next"]
    log.close(30.0)
    answers = False
    assert names(follower) == []


def test_who_follows_a_hub_that_answers_is_not_told_that_the_run_died(tmp_path, monkeypatch, capsys):
    claim, asked = claim_attempt(tmp_path), []

    class Dead:
        def __init__(self, run_dir, claim) -> None:
            pass

        def look(self) -> Sign:
            return Sign(Life.ENDED, "its hub writes no more")

        def heard(self) -> None:
            pass

    def ask(run_dir, question, **more):
        asked.append(more["claim"])
        if len(asked) > 4:
            raise HubUnreachable("no route")
        return [line(n, n) for n in range(len(asked))], len(asked)

    monkeypatch.setattr(events, "Watch", Dead)
    monkeypatch.setattr(events, "ask", ask)
    monkeypatch.setattr(events, "_LOOK_EVERY_S", 0.0)
    wanted = argparse.Namespace(run=str(tmp_path), lines=10, follow=True, json=True)
    assert events.events(wanted) == 1
    out, err = capsys.readouterr()
    assert [json.loads(text)["event"] for text in out.splitlines()] == ["0", "1", "2", "3"]
    assert "died without a verdict" in err and asked == [claim] * 5, "of the attempt that is followed, not a newer one"
