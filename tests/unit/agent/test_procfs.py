"""Reading the process table; the only processes used are the test's own."""

from __future__ import annotations

import os
import signal

import pytest

from miles_hpc.agent import procfs
from miles_hpc.agent.procfs import Process

pytestmark = pytest.mark.unit


def _table(*rows: tuple[int, int]) -> procfs.Table:
    return {pid: Process(pid, ppid, pid, pid, start=pid) for pid, ppid in rows}


def test_the_own_process_is_read_with_its_parent_and_session():
    me = procfs.read_process(os.getpid())
    assert me is not None
    assert (me.ppid, me.pgrp, me.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert procfs.snapshot()[os.getpid()].key == me.key


def test_a_command_name_with_parentheses_and_blanks_does_not_shift_the_fields(monkeypatch):
    stat = b"42 (a) b (c)) S 7 42 41 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 123456 1000 200"
    monkeypatch.setattr(procfs, "_read", lambda path: stat)
    found = procfs.read_process(42)
    assert found is not None and (found.ppid, found.pgrp, found.session, found.start) == (7, 42, 41, 123456)


def test_a_zombie_is_no_living_process(monkeypatch):
    stat = b"42 (x) Z 7 42 41 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 123456 1000 200"
    monkeypatch.setattr(procfs, "_read", lambda path: stat)
    assert procfs.read_process(42) is None


def test_a_process_that_is_gone_is_none():
    assert procfs.read_process(2**22 + 1) is None
    assert procfs.environ(2**22 + 1) == {}
    assert procfs.command_line(2**22 + 1) == ""
    assert procfs.mark_of(2**22 + 1) == ("", "")


def test_descendants_are_listed_parents_first_and_without_the_root():
    table = _table((2, 1), (3, 2), (4, 3), (5, 2), (9, 1))
    found = [process.pid for process in procfs.descendants(table, 2)]
    assert sorted(found) == [3, 4, 5] and found.index(3) < found.index(4)


def test_a_loop_in_the_table_ends():
    """pid reuse while the table is read can make a child its own grandparent."""
    assert sorted(p.pid for p in procfs.descendants(_table((2, 3), (3, 2)), 2)) == [3]


def test_a_pid_with_another_start_time_is_not_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: killed.append((pid, signum)))
    me = procfs.read_process(os.getpid())
    assert me is not None
    reused = Process(me.pid, me.ppid, me.pgrp, me.session, me.start - 1)
    assert not procfs.kill_checked(reused, signal.SIGKILL)
    assert procfs.kill_checked(me, signal.SIGKILL)
    assert killed == [(me.pid, signal.SIGKILL)]


def test_a_marker_counts_only_with_its_run_directory(monkeypatch):
    marks = {1: ("r/0/node-00000/x", "/a"), 2: ("r/0/node-00000/x", "/b"), 3: ("r/0/node-00001/x", "/a"), 4: ("", "")}
    monkeypatch.setattr(procfs, "mark_of", lambda pid: marks[pid])
    table = _table((1, 0), (2, 0), (3, 0), (4, 0))
    assert [p.pid for p in procfs.marked(table, "r/0/node-00000/", "/a")] == [1]
    assert [p.pid for p in procfs.marked(table, "r/0/", "/a", skip=[1])] == [3]


def test_attempt_one_is_no_prefix_of_attempt_ten(monkeypatch):
    monkeypatch.setattr(procfs, "mark_of", lambda pid: ("r/10/node-00000/x", "/a"))
    assert procfs.marked(_table((1, 0)), "r/1/", "/a") == []


def test_the_mark_is_found_in_an_environment(monkeypatch):
    data = b"A=1\0MILES_HPC_MARK=r/0/n/i/w/g1-1\0MILES_HPC_RUN_DIR=/x y\0EMPTY=\0broken\0"
    monkeypatch.setattr(procfs, "_read", lambda path: data)
    assert procfs.mark_of(1) == ("r/0/n/i/w/g1-1", "/x y")
    assert procfs.environ(1)["EMPTY"] == ""


def test_a_worker_inherits_nothing_of_an_outer_run():
    base = {"PATH": "/bin", "MILES_HPC_MARK": "outer", "MILES_HPC_WORKER": "x"}
    assert procfs.worker_environ(base) == {"PATH": "/bin"}


def test_a_process_that_is_older_than_the_worker_is_none_of_its(monkeypatch):
    monkeypatch.setattr(procfs, "mark_of", lambda pid: ("run/0/n/w", "/run"))
    table = {pid: procfs.Process(pid, 1, pid, pid, start) for pid, start in ((5, 99), (6, 100), (7, 101))}
    assert [process.pid for process in procfs.marked(table, "run/0", "/run", since=100)] == [6, 7]
