"""Logs that are cut while their writer goes on."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest

from miles_hpc.agent.worker_logs import LogKeeper, cut

pytestmark = pytest.mark.unit

MIB = 1 << 20


def _lines(first: int, count: int) -> bytes:
    return b"".join(b"%019d\n" % number for number in range(first, first + count))


def test_a_log_within_its_limit_is_left_alone(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(_lines(0, 100))
    before = path.stat()
    assert cut(path, 7, limit=2000, head=500, tail=500) == 7
    assert path.stat() == before


def test_head_and_tail_stay_and_what_is_left_out_is_said(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(_lines(0, 1000))
    assert cut(path, limit=4000, head=1000, tail=1000) == 18_000
    mark = b"\n[miles-hpc: 18000 bytes are left out here; a log keeps 4000 bytes]\n"
    head, found, tail = path.read_bytes().partition(mark)
    assert found and head == _lines(0, 50) and tail == _lines(950, 50)


def test_a_second_cut_counts_on(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(_lines(0, 1000))
    left_out = cut(path, limit=4000, head=1000, tail=1000)
    with path.open("ab") as file:
        file.write(_lines(1000, 1000))
    assert cut(path, left_out, limit=4000, head=1000, tail=1000) > 37_000
    content = path.read_bytes()
    assert content.startswith(_lines(0, 50)) and content.endswith(_lines(1950, 50))
    assert len(re.findall(rb"bytes are left out here", content)) == 1


def test_a_log_that_is_gone_ends_nothing(tmp_path: Path):
    keeper = LogKeeper(limit=MIB, every_s=0.01)
    keeper.watch(tmp_path / "missing")
    path = tmp_path / "log"
    path.write_bytes(b"x" * 2 * MIB)
    keeper.watch(path)
    deadline = time.monotonic() + 10
    while path.stat().st_size > MIB:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    keeper.release(path)
    keeper.close()


def test_a_writer_that_appends_meanwhile_keeps_its_order_and_its_last_words(tmp_path: Path):
    path = tmp_path / "log"
    keeper = LogKeeper(limit=MIB, every_s=0.001)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    keeper.watch(path)
    for first in range(0, 400_000, 500):
        os.write(fd, _lines(first, 500))
    os.write(fd, b"the end\n")
    os.close(fd)
    keeper.release(path)
    keeper.close(10)
    content = path.read_bytes()
    assert len(content) <= MIB and content.startswith(_lines(0, 1000)) and content.endswith(b"the end\n")
    numbers = [int(line) for line in content.splitlines() if len(line) == 19 and line.isdigit()]
    assert numbers == sorted(set(numbers))
