"""The doctor's nodes among each other: their files, and whether they reach one another."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from miles_hpc.launch import mesh
from miles_hpc.launch.allocation import JobKey, Task
from miles_hpc.launch.checks import NodeReport

pytestmark = pytest.mark.unit


def report(index: int, **fields) -> NodeReport:
    return NodeReport(host=f"n{index}", index=index, findings=[], **fields)


def test_a_report_that_is_being_written_is_not_taken_for_one(tmp_path, monkeypatch):
    task = Task(job=JobKey(job_id="7"), step="0", index=0, nodes=2, host="n0", hosts=("n0", "n1"))
    seen = []

    def look_first(draft, target):
        # Another node looks at this very moment.
        seen.append((mesh._others(tmp_path, task), sorted(tmp_path.glob("*.done"))))
        draft.rename(target)

    monkeypatch.setattr(mesh, "SHARED_WITHIN_S", 0.0)
    monkeypatch.setattr(mesh.Path, "replace", look_first)
    mesh._write(tmp_path / "1.json", report(1))
    mesh._write(tmp_path / "1.done", report(1))
    (others, findings), none_done = seen[0]
    assert others == [] and findings[0].level == "fail" and none_done == []
    (others, findings), none_done = seen[1]
    assert others == [report(1)] and findings[0].level == "ok" and none_done == []


def test_many_nodes_that_do_not_answer_cost_the_time_of_one(monkeypatch):
    monkeypatch.setattr(mesh, "CONNECT_WITHIN_S", 1.0)
    with contextlib.ExitStack() as open_sockets:
        silent = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        # A full queue drops what comes more: these connections are never accepted.
        for _ in range(8):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        answering = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16))
        port = silent.getsockname()[1]
        others = [report(index, addresses=["127.0.0.1"], port=port) for index in range(60)]
        others.append(report(60, addresses=["127.0.0.1"], port=answering.getsockname()[1]))
        began = time.monotonic()
        (finding,) = mesh.reach(others)
    assert time.monotonic() - began < 30, "one after the other they take a minute"
    assert finding.level == "fail" and "n0 (127.0.0.1), n1 " in finding.text and "n60" not in finding.text
