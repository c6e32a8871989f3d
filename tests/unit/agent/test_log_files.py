"""Logs that go to this machine first, because they are to or because the run directory stalls."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_hpc.agent.hub_process import HubProcess
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.options import Options
from miles_hpc.agent.patience import Patience, Stalled
from miles_hpc.agent.worker_logs import LogKeeper

pytestmark = pytest.mark.unit


def say(files, name, text):
    with files.opened(name) as (log, path):
        os.write(log, text.encode())
    return path


def hanging(path):
    """Whoever opens this file for writing waits until `let_go` reads it: what a stalled file system looks like."""
    os.mkfifo(path)


def let_go(path):
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def test_output_goes_straight_to_the_run_directory(tmp_path):
    files = LogFiles(tmp_path / "here", tmp_path / "home")
    path = say(files, "w.log", "hello")
    assert path == files.home_of(path) == tmp_path / "home" / "w.log" and path.read_text() == "hello"
    assert files.tail(path, 3) == "llo"
    files.release(path)
    files.close()
    assert not (tmp_path / "here").exists()


def test_with_a_local_directory_it_is_brought_home_when_the_worker_ends(tmp_path):
    files = LogFiles(tmp_path / "here", tmp_path / "home", always=True)
    path = say(files, "w.log", "hello")
    assert path == tmp_path / "here" / "w.log" and files.tail(path, 3) == "llo"
    assert files.home_of(path) == tmp_path / "home" / "w.log"
    files.release(path)
    files.close()
    assert (tmp_path / "home" / "w.log").read_text() == "hello" and not (tmp_path / "here").exists()


def test_what_lives_is_brought_home_when_the_agent_leaves(tmp_path):
    files = LogFiles(tmp_path / "here", tmp_path / "home", always=True)
    say(files, "w.log", "hello")
    files.close()
    assert (tmp_path / "home" / "w.log").read_text() == "hello" and not (tmp_path / "here").exists()


def test_a_running_worker_s_log_comes_home_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_hpc.agent.log_files.SHIP_EVERY_S", 0.01)
    files = LogFiles(tmp_path / "here", tmp_path / "home", always=True)
    target = tmp_path / "home" / "w.log"

    def home(text):
        deadline = time.monotonic() + 10
        while not target.exists() or target.read_text() != text:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    say(files, "w.log", "one ")
    home("one ")
    say(files, "w.log", "two")
    home("one two")
    files.close()
    assert target.read_text() == "one two"


def test_a_log_whose_middle_was_taken_out_comes_home_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_hpc.agent.log_files.SHIP_EVERY_S", 0.01)
    monkeypatch.setattr("miles_hpc.agent.log_files.LogKeeper", lambda: LogKeeper(limit=4000, every_s=0.005))
    files = LogFiles(tmp_path / "here", tmp_path / "home", always=True)
    path = say(files, "w.log", "".join(f"{number:09d}\n" for number in range(300)))
    for number in range(300, 3000, 100):
        say(files, "w.log", "".join(f"{n:09d}\n" for n in range(number, number + 100)))
        time.sleep(0.002)
    files.release(path)
    files.close()
    text = (tmp_path / "home" / "w.log").read_text()
    assert text.startswith("000000000\n000000001\n") and text.endswith("000002998\n000002999\n")
    assert text.count("bytes are left out here") == 1 and len(text) <= 5000
    assert [entry.name for entry in (tmp_path / "home").iterdir()] == ["w.log"]


def test_while_the_run_directory_stalls_a_log_begins_here_and_comes_home_later(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    hanging(home / "stuck.log")
    files = LogFiles(tmp_path / "here", home, patience=Patience(0.05))
    began = time.monotonic()
    assert say(files, "stuck.log", "begun").parent == tmp_path / "here"
    path = say(files, "w.log", "hello")
    assert path.parent == tmp_path / "here", "while one open hangs no other is tried"
    assert time.monotonic() - began < 5
    assert files.tail(home / "other.log", 10) == "" and files.tail(path, 10) == "hello"
    reader = let_go(home / "stuck.log")
    deadline = time.monotonic() + 10
    while (again := say(files, "x.log", "back")).parent != home:
        assert time.monotonic() < deadline
    os.close(reader)
    files.release(path)
    files.release(again)
    (home / "stuck.log").unlink()
    files.close()
    assert (home / "w.log").read_text() == "hello" and (home / "x.log").read_text().endswith("back")


def test_a_hub_that_is_started_again_during_a_stall_leaves_its_predecessor_s_log_alone(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    hanging(home / "stuck.log")
    (home / "hub.log").write_text("the first hub's last words")
    files = LogFiles(tmp_path / "here", home, patience=Patience(0.05))
    say(files, "stuck.log", "")
    supervisor = SimpleNamespace(spawn=lambda name, generation, argv, env, log: os.write(log, b"the second's"))
    options = Options(run_dir=tmp_path, attempt=0, node_index=0, address="127.0.0.1", run_id="r", incarnation="i")
    HubProcess(options, files, supervisor).start()
    reader = let_go(home / "stuck.log")
    (home / "stuck.log").unlink()
    files.close()
    os.close(reader)
    assert (home / "hub.log").read_text() == "the first hub's last words"
    assert [path.read_text() for path in home.glob("hub.*.log")] == ["the second's"]


def test_the_hub_of_the_next_agent_adds_to_its_predecessor_s_log_with_a_local_directory_too(tmp_path):
    options = Options(run_dir=tmp_path, attempt=0, node_index=0, address="127.0.0.1", run_id="r", incarnation="i")
    for words in (b"the first hub's last words\n", b"the second's"):
        files = LogFiles(tmp_path / "here", tmp_path / "home", always=True)
        supervisor = SimpleNamespace(spawn=lambda name, generation, argv, env, log, words=words: os.write(log, words))
        HubProcess(options, files, supervisor).start()
        files.close()
    assert (tmp_path / "home" / "hub.log").read_text() == "the first hub's last words\nthe second's"


def test_what_a_killed_agent_has_left_here_comes_home(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "old.log").write_text("last words")
    LogFiles(tmp_path / "here", tmp_path / "home").close()
    assert (tmp_path / "home" / "old.log").read_text() == "last words" and not (tmp_path / "here").exists()


def test_what_cannot_come_home_stays_here(tmp_path):
    (tmp_path / "home").write_text("not a directory")
    files = LogFiles(tmp_path / "here", tmp_path / "home", always=True)
    path = say(files, "w.log", "hello")
    files.release(path)
    files.close()
    assert path.read_text() == "hello"


def test_work_that_hangs_is_given_up_and_what_it_brings_late_is_taken_care_of():
    patience, go, late = Patience(0.05), threading.Event(), []
    arrived = threading.Event()

    def take(value):
        late.append(value)
        arrived.set()

    with pytest.raises(Stalled, match=r"within 0\.05 s"):
        patience.do(lambda: go.wait(20) and "late", take)
    with pytest.raises(Stalled, match="has stalled"):
        patience.do(lambda: "never begun")
    go.set()
    assert arrived.wait(10) and late == ["late"]
    assert patience.do(lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        patience.do(lambda: Path("/nowhere/at/all").stat())
    patience.close()
