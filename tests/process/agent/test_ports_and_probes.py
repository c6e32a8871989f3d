"""Ports that somebody else wants, and probes of real servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.agent.ports import PortLocks, Ports, describe_holder
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import PortInfo, Probe, StartWorker, WorkerExited, WorkerReady

from .conftest import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

WORKER = "pool-00000-00000"
SERVER = """
import http.server, os, signal, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if os.path.exists(sys.argv[2] + ".hang"):
            time.sleep(60)
        code = 503 if os.path.exists(sys.argv[2] + ".bad") else 200
        self.send_response(code); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
time.sleep(float(sys.argv[3]))
http.server.ThreadingHTTPServer(("127.0.0.2", int(sys.argv[1])), Handler).serve_forever()
"""
COUNTER = """
from miles_hpc.wire.progress import ProgressCounter
counter = ProgressCounter.from_environ()
def count():
    while not os.path.exists(sys.argv[2] + ".still"):
        counter.bump()
        time.sleep(0.02)
threading.Thread(target=count, daemon=True).start()
"""
LISTENER = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def _listener(address: str = "127.0.0.2", port: int = 0) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, address, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture
def stranger():
    process, port = _listener()
    yield process, port
    process.communicate("")


def test_a_busy_fixed_port_is_refused_with_its_holder(hub, node, stranger):
    process, port = stranger
    answer = hub.reserve(WORKER, [PortInfo(name="http", static_port=port, allow_dynamic=False)])
    assert answer.ports == {}
    assert f"port {port} ('http')" in answer.error and f"pid {process.pid}: " in answer.error
    assert "socket.create_server" in answer.error


def test_a_preferred_port_that_is_busy_gives_way_to_a_dynamic_one(hub, node, stranger):
    _, port = stranger
    answer = hub.reserve(WORKER, [PortInfo(name="http", static_port=port)])
    assert answer.error == "" and answer.ports["http"] not in (0, port)


def test_a_port_that_is_taken_between_reservation_and_start_is_found(hub, node):
    ports = hub.reserve(WORKER, [PortInfo(name="http")]).ports
    thief, _ = _listener(port=ports["http"])
    try:
        hub.send(
            "node-00000",
            StartWorker(
                worker=WORKER, generation=Generation(1, 1), argv=[sys.executable], env={}, ports=ports, probe=Probe()
            ),
        )
        ended = hub.exited(WORKER)
        assert ended.cause == "port_taken" and f"pid {thief.pid}" in ended.text
    finally:
        thief.communicate("")
    # A restart keeps its ports when they are free again.
    assert hub.reserve(WORKER, [PortInfo(name="http")], n=2, keep=ports).ports == ports


def test_a_program_that_loses_its_port_says_so(hub, node, stranger):
    _, port = stranger
    hub.start(
        WORKER,
        f"import socket; socket.create_server(('127.0.0.2', {port}))",
        ports={"http": port},
    )
    ended = hub.exited(WORKER)
    assert ended.exit_code == 1 and "EADDRINUSE" in ended.text


def test_a_stranger_that_answers_on_the_port_does_not_make_a_worker_ready(hub, node, stranger):
    process, port = stranger
    probe = Probe(kind="tcp", port="http")
    hub.start(WORKER, "import signal; signal.pause()", probe=probe, ports={"http": port})
    ended = hub.exited(WORKER)
    assert ended.cause == "port_taken" and f"pid {process.pid}" in ended.text
    assert hub.reports(WorkerReady) == []


def test_a_restart_keeps_its_ports(hub, node):
    infos = [PortInfo(name="http"), PortInfo(name="nccl", num_consecutive=3)]
    first = hub.reserve(WORKER, infos).ports
    hub.start(WORKER, LISTENER, ports=first, arguments=("127.0.0.2", str(first["http"])))
    hub.exited(WORKER)  # its stdin is empty, so it ends
    assert hub.reserve(WORKER, infos, n=2, keep=first).ports == first


def test_agents_on_one_machine_choose_different_ports(hub, node, nodes):
    nodes.start(1)
    hub.join("node-00001")
    mine = {hub.reserve(f"pool-{i:05d}-00000", [PortInfo(name="p")]).ports["p"] for i in range(20)}
    theirs = {
        hub.reserve(f"pool-{i:05d}-00000", [PortInfo(name="p")], n=2, node="node-00001").ports["p"] for i in range(20)
    }
    assert len(mine) == len(theirs) == 20 and not mine & theirs


def test_a_port_lock_keeps_another_agent_away_and_ends_with_its_process(tmp_path):
    code = f"""
import sys
from miles_hpc.agent.ports import PortLocks
locks = PortLocks({str(tmp_path)!r})
print(locks.take(25000), flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    locks = PortLocks(str(tmp_path))
    assert not locks.take(25000) and locks.take(25001)
    ports = Ports("127.0.0.2", run_id="r", attempt=0, node="n", port_range=(25000, 25010), locks=locks)
    infos = [PortInfo(name="p", static_port=25000, allow_dynamic=False)]
    with pytest.raises(Exception, match="another run"):
        ports.reserve(WORKER, infos, 0, {})
    holder.kill()
    holder.communicate()
    assert ports.reserve(WORKER, infos, 0, {}) == {"p": 25000}
    locks.close()


def test_holders_of_ipv6_and_wildcard_listeners_are_found():
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert f"pid {os.getpid()}" in describe_holder(server.getsockname()[1])
    if socket.has_dualstack_ipv6():
        with socket.create_server(("::", 0), family=socket.AF_INET6) as server:
            assert f"pid {os.getpid()}" in describe_holder(server.getsockname()[1])


# ---------------------------------------------------------------------------------------------- probes
@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_a_worker_is_ready_when_it_serves(hub, node, tmp_path, kind):
    ports = hub.reserve(WORKER, [PortInfo(name="http")]).ports
    probe = Probe(kind=kind, port="http", interval=0.2)
    started = time.monotonic()
    hub.start(WORKER, SERVER, ports=ports, probe=probe, arguments=(str(ports["http"]), str(tmp_path / "f"), "0.8"))
    hub.ready(WORKER)
    assert 0.8 < time.monotonic() - started < 20


@pytest.mark.parametrize("flaw", ["bad", "hang"])
def test_a_worker_that_stops_answering_is_stopped(hub, node, tmp_path, flaw):
    ports = hub.reserve(WORKER, [PortInfo(name="http")]).ports
    probe = Probe(kind="http", port="http", path="/health", interval=0.1, timeout=0.3, threshold=3)
    hub.start(WORKER, SERVER, ports=ports, probe=probe, arguments=(str(ports["http"]), str(tmp_path / "f"), "0"))
    hub.ready(WORKER)
    Path(f"{tmp_path}/f.{flaw}").touch()
    ended = hub.exited(WORKER)
    assert ended.cause == "probe_failed" and "3 probes in a row failed" in ended.text
    assert ("503" in ended.text) if flaw == "bad" else ("no answer" in ended.text)


def test_a_busy_worker_that_moves_is_left_alone_and_one_that_stands_still_is_stopped(hub, node, tmp_path):
    ports = hub.reserve(WORKER, [PortInfo(name="http")]).ports
    # The machine may keep the counting thread off its CPUs for as long as three probes last.
    probe = Probe(kind="http", port="http", path="/health", interval=0.1, timeout=1.0, threshold=3, stall=120.0)
    program = SERVER.replace("class Handler", COUNTER + "class Handler")
    hub.start(WORKER, program, ports=ports, probe=probe, arguments=(str(ports["http"]), str(tmp_path / "f"), "0"))
    hub.ready(WORKER)
    Path(f"{tmp_path}/f.hang").touch()
    busy_until = time.monotonic() + 3 * 3 * (probe.interval + probe.timeout)
    hub.until(lambda: time.monotonic() > busy_until, "three times as long as it takes to fail")
    assert not any(isinstance(message, WorkerExited) for _, message in hub.heard)
    Path(f"{tmp_path}/f.still").touch()
    ended = hub.exited(WORKER)
    assert ended.cause == "probe_failed" and "3 probes in a row failed" in ended.text and "no answer" in ended.text


def test_one_bad_answer_is_forgiven(hub, node, tmp_path):
    ports = hub.reserve(WORKER, [PortInfo(name="http")]).ports
    probe = Probe(kind="http", port="http", interval=0.5, timeout=1, threshold=3)
    hub.start(WORKER, SERVER, ports=ports, probe=probe, arguments=(str(ports["http"]), str(tmp_path / "f"), "0"))
    hub.ready(WORKER)
    flaw = Path(f"{tmp_path}/f.bad")
    flaw.touch()
    hub.until(lambda: time.monotonic() - flaw.stat().st_mtime < 0 or time.time() - flaw.stat().st_mtime > 0.7, "0.7 s")
    flaw.unlink()
    assert not eventually(lambda: bool(hub.pump() or hub.reports(type(None))), 1.5)


def test_a_worker_that_never_serves_is_stopped_at_its_start_deadline(hub, node):
    ports = hub.reserve(WORKER, [PortInfo(name="http")]).ports
    probe = Probe(kind="http", port="http", start_deadline=0.8)
    hub.start(WORKER, "import signal; signal.pause()", ports=ports, probe=probe)
    ended = hub.exited(WORKER)
    assert ended.cause == "start_deadline" and "Connection refused" in ended.text
    assert hub.reports(WorkerReady) == []
