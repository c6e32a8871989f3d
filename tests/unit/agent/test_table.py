"""Orders and reports, with a supervisor that starts nothing."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.agent.cgroups import WorkerGroups
from miles_hpc.agent.gpus import NodeGpus, ReleasedGpus
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.ports import PortLocks, Ports
from miles_hpc.agent.probes import Finding
from miles_hpc.agent.scratch import Scratch
from miles_hpc.agent.supervise import Exit, SpawnError
from miles_hpc.agent.surroundings import NodeSurroundings
from miles_hpc.agent.table import WorkerTable
from miles_hpc.agent.watches import Watches
from miles_hpc.config.node import GpuConfig
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    Gpu,
    Message,
    PortInfo,
    PortsReserved,
    Probe,
    ReservePorts,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)

pytestmark = pytest.mark.unit

W = "pool-00000-00000"
GPUS = [Gpu(uuid="GPU-b", index=1), Gpu(uuid="GPU-a", index=3)]


def g(n: int) -> Generation:
    return Generation(1, n)


@dataclass
class FakeProcess:
    pid: int = 4242
    stop_grace: float = 5.0


@dataclass
class FakeSupervisor:
    """Records what it is told to do."""

    workers: dict[str, FakeProcess] = field(default_factory=dict)
    spawned: list[dict[str, Any]] = field(default_factory=list)
    stopped: list[tuple[Any, ...]] = field(default_factory=list)
    failure: str = ""

    def spawn(self, name, generation, argv, env, log, *, stop_grace, ports_free, group):
        if self.failure:
            raise SpawnError(self.failure)
        self.spawned.append({"name": name, "generation": generation, "argv": argv, "env": env, "log": log})
        self.workers[name] = FakeProcess(stop_grace=stop_grace)
        return self.workers[name]

    def stop(self, name, cause="stopped", text="", *, grace=None):
        self.stopped.append((name, cause, text, grace))

    def pids(self, name):
        return [self.workers[name].pid]


class Node:
    def __init__(self, tmp_path: Path, inherited: str | None = None) -> None:
        self.sent: list[Message] = []
        self.supervisor = FakeSupervisor()
        self.ports = Ports("127.0.0.9", run_id="r", attempt=0, node="n", locks=PortLocks(str(tmp_path)))
        self.scratch = Scratch("k", {"TMPDIR": str(tmp_path)})
        self.log = JsonLog(tmp_path / "agent.jsonl", "node-00000")
        self.now = 0.0
        self.watches = Watches(lambda: self.now)
        self.table = WorkerTable(
            self.supervisor,  # type: ignore[arg-type]
            self.ports,
            self.watches,
            NodeSurroundings(
                LogFiles(tmp_path / "local", tmp_path),
                self.scratch,
                NodeGpus(GPUS, inherited),
                WorkerGroups("unused", []),
                environ=os.environ,
            ),
            self.log,
            self.sent.append,
        )

    def close(self) -> None:
        self.ports.close()
        self.log.close()
        self.scratch.close()

    def took(self) -> list[Message]:
        sent, self.sent[:] = list(self.sent), []
        return sent

    def reserve(self, n: int = 1, *, accept: bool = True, **fields: Any) -> None:
        order = ReservePorts(worker=W, generation=g(n), ports=[PortInfo(name="http")], **fields)
        self.table.on_reserve(order, accept=accept)

    def start(self, n: int = 1, *, accept: bool = True, probe: Probe | None = None, **fields: Any) -> None:
        fields = {"argv": [sys.executable], "env": {}, "ports": {}, **fields}
        order = StartWorker(**{"worker": W, "generation": g(n), "probe": probe or Probe(), **fields})
        self.table.on_start(order, accept=accept)
        while order.gpu_uuids and self.table._awaiting_gpus():
            self.table.advance()
            select.select(self.table.pollable(), [], [], 0.01)

    def end(self, n: int = 1, by_slurm: bool = False, **fields: Any) -> None:
        """Nothing is left of the worker."""
        self.supervisor.workers.pop(W, None)
        self.table.on_exit(self._exit(n, fields), by_slurm=by_slurm)

    def ended(self, n: int = 1, **fields: Any) -> None:
        """Its first process has ended."""
        self.table.on_ended(self._exit(n, fields), by_slurm=False)

    def overdue(self, n: int = 1, **fields: Any) -> None:
        """It was killed long ago, and something of it is left."""
        self.table.on_overdue(self._exit(n, fields), by_slurm=False)

    @staticmethod
    def _exit(n: int, fields: dict[str, Any]) -> Exit:
        given: dict[str, Any] = {
            "exit_code": 1,
            "signal": None,
            "killed_by_us": False,
            "cause": "exited",
            "text": "",
            "leftovers": 0,
        }
        return Exit(name=W, generation=g(n), pid=4242, **{**given, **fields})


@pytest.fixture
def node(tmp_path: Path):
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_worker_goes_through_its_states(node):
    node.reserve()
    (reserved,) = node.took()
    assert isinstance(reserved, PortsReserved) and not reserved.error
    assert [(r.state, r.ports) for r in node.table.rows()] == [("reserved", reserved.ports)]
    assert not node.table.running()
    node.start(ports=reserved.ports)
    assert node.took() == [
        WorkerStarted(worker=W, generation=g(1), pid=4242),
        WorkerReady(worker=W, generation=g(1)),
    ]
    assert [r.state for r in node.table.rows()] == ["ready"] and node.table.running()
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="why"))
    assert node.supervisor.stopped == [(W, "stopped", "why", None)]
    assert [r.state for r in node.table.rows()] == ["stopping"]
    assert node.took() == []
    node.end(cause="stopped", text="why", exit_code=0)
    (exited,) = node.took()
    assert isinstance(exited, WorkerExited) and (exited.cause, exited.text) == ("stopped", "why")
    assert node.table.rows() == []


def test_a_worker_with_a_probe_is_ready_only_when_it_answers(node):
    node.reserve()
    ports = node.sent[-1].ports
    node.start(ports=ports, probe=Probe(kind="tcp", port="http"))
    assert [type(m) for m in node.took()] == [PortsReserved, WorkerStarted]
    node.table.on_finding(Finding(W, g(1), "ready"))
    assert node.took() == [WorkerReady(worker=W, generation=g(1))]


@pytest.mark.parametrize("kind", ["probe_failed", "start_deadline"])
def test_a_failed_probe_stops_the_worker_with_its_cause(node, kind):
    node.start()
    node.table.on_finding(Finding(W, g(1), kind, "why"))
    node.table.on_finding(Finding(W, g(1), kind, "again"))
    assert node.supervisor.stopped == [(W, kind, "why", None)]


def test_a_worker_that_has_lost_an_essential_process_is_killed_and_the_hub_hears_of_it_before_it_is_gone(node):
    node.start()
    node.took()
    text = "its process sglang::scheduler (pid 7), without which it cannot go on, was killed by signal 9"
    node.table.on_finding(Finding(W, g(1), "process_lost", text, 9))
    assert node.supervisor.stopped == [(W, "process_lost", text, 0.0)]
    (first,) = node.took()
    assert (first.cause, first.text, first.signal, first.gone) == ("process_lost", text, None, False)
    node.end(exit_code=None, signal=9, killed_by_us=True, cause="process_lost", text=text)
    (last,) = node.took()
    assert (last.cause, last.text, last.gone) == ("process_lost", text, True)


def test_one_that_slurm_has_ended_is_no_loss(node):
    node.start()
    node.took()
    node.table.on_finding(Finding(W, g(1), "process_lost", "why"), by_slurm=True)
    assert [message.cause for message in node.took()] == ["stopped_by_slurm"]
    assert node.supervisor.stopped == [(W, "stopped_by_slurm", "why", 0.0)]


@pytest.mark.parametrize("how", [{"signal": 15, "exit_code": None}, {"exit_code": 143}, {"exit_code": 1}])
def test_one_whose_first_process_has_ended_loses_the_others_to_the_agents_own_kill(node, monkeypatch, how):
    part = subprocess.Popen([sys.executable, "-c", "input()", "part::one"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setattr(node.supervisor, "pids", lambda name: [4242, part.pid])
        node.start(essential_processes=["part::"])
        assert node.watches.essentials.next_deadline() < math.inf or node.watches.essentials.filenos()
        node.took()
        node.ended(**how)
    finally:
        part.kill()
        part.wait()
    node.now += 10.0
    node.watches.advance(set(node.watches.filenos()))
    node.now += 10.0
    assert node.watches.advance(set(node.watches.filenos())) == []


def test_a_worker_that_is_being_stopped_loses_its_processes_as_it_should(node):
    node.start()
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="why"))
    node.took()
    node.table.on_finding(Finding(W, g(1), "process_lost", "why", 15))
    assert node.took() == [] and len(node.supervisor.stopped) == 1


@pytest.mark.parametrize("kind", ["probe_failed", "start_deadline"])
def test_the_hub_hears_once_of_a_worker_that_does_not_end_although_its_agent_has_killed_it(node, kind):
    node.start()
    node.table.on_finding(Finding(W, g(1), kind, "why"))
    node.took()
    for _ in range(2):
        node.overdue(exit_code=None, cause=kind, text="why", killed_by_us=True)
    (first,) = node.took()
    assert (first.cause, first.gone, first.signal) == (kind, False, None)
    assert first.text == "why; it was killed, and has not ended yet"
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="its cell ends"))
    node.end(exit_code=None, signal=9, cause=kind, text="why", killed_by_us=True)
    (last,) = node.took()
    assert (last.cause, last.gone, last.text) == (kind, True, "why")


def test_the_hub_hears_of_what_does_not_end_after_a_term_that_nobody_explained(node):
    node.start()
    node.took()
    how = {"exit_code": None, "signal": 15}
    node.ended(**how)
    node.overdue(**how)
    (first,) = node.took()
    assert (first.cause, first.signal, first.gone) == ("exited", 15, False)
    assert [row.state for row in node.table.rows()] == ["stopping"]


@pytest.mark.parametrize("how", ["overdue", "ended"])
def test_a_hub_that_says_welcome_hears_once_more_of_what_has_ended_and_is_not_gone(node, how):
    node.start()
    node.table.tell_of_ends()
    node.took()
    if how == "overdue":
        node.overdue(exit_code=None, cause="probe_failed", text="why", killed_by_us=True)
    else:
        node.ended(exit_code=3)
    (first,) = node.took()
    node.table.tell_of_ends()
    (again,) = node.took()
    assert (again.cause, again.exit_code, again.gone) == (first.cause, first.exit_code, False)
    node.end(exit_code=3)
    node.took()
    node.table.tell_of_ends()
    assert node.took() == []


def test_the_hub_knows_of_a_stop_that_it_has_begun(node):
    node.start()
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="why"))
    node.took()
    node.overdue(exit_code=None, cause="stopped", text="why", killed_by_us=True)
    assert node.took() == []


def test_a_finding_about_another_generation_is_thrown_away(node):
    node.start(n=2)
    node.table.on_finding(Finding(W, g(1), "probe_failed", "late"))
    assert node.supervisor.stopped == []


def test_orders_twice_are_answered_alike_and_done_once(node):
    node.reserve()
    node.reserve()
    first, second = node.took()
    assert first == second
    node.start()
    node.took()
    node.start()
    assert node.took() == [WorkerStarted(worker=W, generation=g(1), pid=4242)]
    assert len(node.supervisor.spawned) == 1


def test_an_older_generation_is_refused(node):
    node.reserve(n=5)
    node.took()
    node.reserve(n=4)
    (answer,) = node.took()
    assert isinstance(answer, PortsReserved) and "older than 1-5" in answer.error
    node.start(n=4)
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and report.cause == "spawn_failed" and report.generation == g(4)
    assert node.supervisor.spawned == []


def test_a_newer_reservation_replaces_an_older_one(node):
    node.reserve(n=1)
    node.reserve(n=2)
    assert [str(r.generation) for r in node.table.rows()] == ["1-2"]


def test_a_running_worker_keeps_its_place(node):
    node.start(n=1)
    node.took()
    node.reserve(n=2)
    node.start(n=2)
    answer, report = node.took()
    assert isinstance(answer, PortsReserved) and "not stopped yet" in answer.error
    assert isinstance(report, WorkerExited) and "not stopped yet" in report.text
    assert [str(r.generation) for r in node.table.rows()] == ["1-1"]


def test_a_stop_of_another_generation_stops_nothing_and_is_confirmed(node):
    node.start(n=3)
    node.took()
    node.table.on_stop(StopWorker(worker=W, generation=g(2)))
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and (report.generation, report.cause) == (g(2), "stopped")
    assert node.supervisor.stopped == []


def test_a_reservation_is_given_back_by_a_stop(node):
    node.reserve()
    node.took()
    node.table.on_stop(StopWorker(worker=W, generation=g(1)))
    assert node.table.rows() == [] and [type(m) for m in node.took()] == [WorkerExited]


def test_a_leaving_agent_takes_no_work(node):
    node.reserve(accept=False)
    node.start(accept=False)
    answer, report = node.took()
    assert isinstance(answer, PortsReserved) and "leaving" in answer.error
    assert isinstance(report, WorkerExited) and "leaving" in report.text


def test_a_failed_spawn_is_reported_and_leaves_no_row_and_no_scratch(node):
    node.supervisor.failure = "no process could be made"
    node.start()
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and report.text == "no process could be made"
    assert node.table.rows() == [] and list(node.scratch.root.iterdir()) == []


def test_the_order_s_environment_wins(node):
    node.start(env={"TMPDIR": "/mine", "MILES_HPC_WORKER": W})
    env = node.supervisor.spawned[0]["env"]
    assert env["TMPDIR"] == "/mine" and env["MILES_HPC_WORKER"] == W
    assert env["PYTHONUNBUFFERED"] == "1" and env["MILES_HPC_PROGRESS"]


@pytest.mark.parametrize(
    ("inherited", "told"), [(None, "3,1"), ("1,3", "3,1"), ("GPU-b,GPU-a", "GPU-a,GPU-b"), ("", "3,1")]
)
def test_gpus_are_given_in_the_form_that_was_inherited(tmp_path, inherited, told):
    node = Node(tmp_path, inherited)
    node.start(gpu_uuids=["GPU-a", "GPU-b"])
    node.start(n=1, worker="pool-00001-00000")
    with_gpus, without = (call["env"]["CUDA_VISIBLE_DEVICES"] for call in node.supervisor.spawned)
    assert (with_gpus, without) == (told, "")
    node.close()


def test_a_driver_that_hangs_holds_nobody_up_and_is_given_up_by_name(node, monkeypatch):
    go = threading.Event()
    gpus = node.table._surroundings.gpus
    gpus.config = GpuConfig(wait_s=0.05)
    monkeypatch.setattr(gpus, "held", lambda uuids: go.wait(20) and {})
    monkeypatch.setattr("miles_hpc.agent.table.NVML_PATIENCE_S", 0.1)
    fields = {"argv": [sys.executable], "env": {}, "ports": {}, "probe": Probe(), "gpu_uuids": ["GPU-a"]}
    order = StartWorker(worker=W, generation=g(1), **fields)
    node.table.on_start(order, accept=True)
    node.table.advance()
    node.start(worker="pool-00001-00000")
    assert [call["name"] for call in node.supervisor.spawned] == ["pool-00001-00000"]
    node.took()
    deadline = time.monotonic() + 10
    while not (sent := node.took()):
        assert time.monotonic() < deadline
        node.table.advance()
        time.sleep(0.005)
    go.set()
    assert sent[0].cause == "spawn_failed" and "NVML has not answered" in sent[0].text
    assert node.table.rows()[0].worker == "pool-00001-00000"


def looks(node, until):
    """The looks at GPUs that come one after the other."""
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        node.table.advance()
        select.select(node.table.pollable(), [], [], 0.01)


def test_a_gpu_that_is_not_given_back_after_a_stop_is_said_with_its_holder_and_once(node, monkeypatch):
    monkeypatch.setattr("miles_hpc.agent.table.GPU_LOOK_S", 0.01)
    gpus = node.table._surroundings.gpus
    asked = []
    monkeypatch.setattr(gpus, "held", lambda uuids: asked.append(list(uuids)) or {"GPU-a": "", "GPU-b": holder[0]})
    node.table._released = ReleasedGpus(0.05)
    holder = [""]
    node.start(gpu_uuids=["GPU-a", "GPU-b"])
    holder[0] = "held by pid 7 left over"
    del asked[:]
    node.end()
    looks(node, lambda: not node.table._released.uuids())
    assert asked[0] == ["GPU-a", "GPU-b"] and {tuple(uuids) for uuids in asked[1:]} == {("GPU-b",)}
    node.log.close()
    lines = [json.loads(text) for text in node.log.path.read_text().splitlines()]
    said = [(line["worker"], line["held"]) for line in lines if line["event"] == "gpus_not_released"]
    assert said == [(W, "held by pid 7 left over")]


def test_a_replacement_on_gpus_that_were_just_given_back_starts_at_once(node, monkeypatch):
    gpus = node.table._surroundings.gpus
    monkeypatch.setattr(gpus, "held", lambda uuids: dict.fromkeys(uuids, ""))
    node.start(gpu_uuids=["GPU-a"])
    node.end()
    node.start(n=2, gpu_uuids=["GPU-a"])
    assert len(node.supervisor.spawned) == 2 and node.table._released.uuids() == []


def test_a_gpu_of_another_node_is_refused_by_name(node):
    node.start(gpu_uuids=["GPU-z"])
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and report.cause == "spawn_failed" and "no GPU GPU-z" in report.text


def test_stop_all_caps_the_grace_and_drops_reservations(node):
    node.start(stop_grace=20.0)
    node.table.stop_all("the end", 3.0)
    assert node.supervisor.stopped == [(W, "stopped", "the end", 3.0)]
    node.table.stop_all("the end", None)
    assert node.supervisor.stopped[-1] == (W, "stopped", "the end", 20.0)


def test_a_lost_port_race_is_named(node, tmp_path):
    node.start()
    (tmp_path / f"{W}.g1-1.log").write_text("OSError: [Errno 98] Address already in use\n")
    node.took()
    node.end()
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and "EADDRINUSE" in report.text


@pytest.mark.parametrize(
    ("own", "machine", "pressure", "killed_by_us", "expected"),
    [
        ((0, 1), (5, 6), False, False, "yes"),
        ((1, 1), (5, 6), True, False, "no"),
        ((None, None), (5, 6), False, False, "probable"),
        ((None, None), (5, 5), True, False, "probable"),
        ((None, None), (None, None), False, False, "no"),
        ((0, 1), (5, 6), True, True, "no"),
    ],
)
def test_a_kill_that_was_not_ours_may_be_the_kernel_s(
    node, monkeypatch, own, machine, pressure, killed_by_us, expected
):
    own_counts, machine_counts = iter(own), iter(machine)
    monkeypatch.setattr("miles_hpc.agent.cgroups.own_oom_kills", lambda: next(own_counts))
    monkeypatch.setattr("miles_hpc.agent.cgroups.machine_oom_kills", lambda: next(machine_counts))
    monkeypatch.setattr("miles_hpc.agent.cgroups.memory_pressure", lambda: pressure)
    node.start()
    node.took()
    node.end(exit_code=None, signal=9, killed_by_us=killed_by_us)
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and report.oom == expected


def test_what_was_left_behind_is_said(node):
    node.start()
    node.took()
    node.end(leftovers=2)
    (report,) = node.took()
    assert isinstance(report, WorkerExited) and "2 processes that it had started were killed" in report.text


def test_the_hub_hears_of_an_end_before_the_rest_is_gone(node):
    node.start()
    node.took()
    node.ended(exit_code=1)
    (first,) = node.took()
    assert (first.gone, first.exit_code, first.cause) == (False, 1, "exited")
    assert [row.state for row in node.table.rows()] == ["stopping"]
    node.end(exit_code=1, leftovers=1)
    (second,) = node.took()
    assert (second.gone, second.exit_code, second.cause) == (True, 1, "exited")
    assert "1 processes that it had started were killed" in second.text
    assert node.table.rows() == []


@pytest.mark.parametrize(
    "how", [{"exit_code": None, "signal": 15}, {"exit_code": 143}, {"exit_code": None, "signal": 12}]
)
def test_an_end_by_a_signal_that_may_be_slurm_s_is_told_when_the_agent_may_know(node, how):
    node.start()
    node.took()
    node.ended(**how)
    assert node.took() == []
    node.end(by_slurm=True, **how)
    (report,) = node.took()
    assert (report.gone, report.cause) == (True, "stopped_by_slurm")
