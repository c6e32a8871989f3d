"""A program's log, on a file that takes nothing for a while."""

import logging
import os
import sys
import threading

import pytest

from miles_hpc.wire import program

pytestmark = pytest.mark.unit


@pytest.fixture
def root(monkeypatch):
    """A root logger without handlers; pytest adds its own to whatever the root is when a test begins."""

    class Fresh(logging.RootLogger):
        def addHandler(self, handler):
            if not type(handler).__module__.startswith("_pytest"):
                super().addHandler(handler)

    fresh = Fresh(logging.WARNING)
    monkeypatch.setattr(logging, "getLogger", lambda name=None: fresh)
    return fresh


@pytest.fixture
def full_pipe():
    """For standard error: a pipe that is full, so that whoever writes there waits."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    filled = 0
    while True:
        try:
            filled += os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    with os.fdopen(write_end, "w") as stderr:
        yield read_end, filled, stderr


def drain(read_end, size):
    found = b""
    while len(found) < size:
        found += os.read(read_end, 65536)
    return found


def test_under_an_agent_a_stalled_log_file_holds_nobody_up(root, full_pipe, monkeypatch):
    monkeypatch.setenv(program.STOP_SIGNAL, "SIGHUP")
    read_end, filled, stderr = full_pipe
    monkeypatch.setattr(sys, "stderr", stderr)
    program.setup_logging()
    for number in range(100):
        root.info("line %d", number)
    drain(read_end, filled)
    root.handlers[0].flush()
    lines = os.read(read_end, 1 << 20).decode().splitlines()
    assert len(lines) == 100 and lines[-1].endswith("INFO root: line 99")
    os.close(read_end)


def test_what_is_too_much_for_memory_is_left_out(root, full_pipe, monkeypatch):
    monkeypatch.setenv(program.STOP_SIGNAL, "SIGHUP")
    monkeypatch.setattr(program, "WAITING_LIMIT", 10)
    read_end, filled, stderr = full_pipe
    monkeypatch.setattr(sys, "stderr", stderr)
    program.setup_logging()
    for number in range(100):
        root.info("line %d", number)
    drain(read_end, filled)
    root.handlers[0].flush()
    assert 10 <= len(os.read(read_end, 1 << 20).splitlines()) <= 12
    os.close(read_end)


def test_by_hand_there_is_no_thread_between_a_program_and_its_words(root, monkeypatch, capsys):
    monkeypatch.delenv(program.STOP_SIGNAL, raising=False)
    before = threading.active_count()
    program.setup_logging()
    program.setup_logging(logging.DEBUG)
    root.debug("hello")
    assert threading.active_count() == before and len(root.handlers) == 1
    assert capsys.readouterr().err.count("hello") == 1
