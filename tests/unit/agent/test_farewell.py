"""What a worker is told before its stop signal, and that nobody waits long for its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from miles_hpc.agent.farewell import FAREWELL_S, Farewell
from miles_hpc.agent.probes import Finding
from miles_hpc.wire import security
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import HttpCall, Probe, StopWorker

from .test_table import Node, W, g

pytestmark = pytest.mark.unit

CALLS = [HttpCall(path="/abort_request", body='{"abort_all": true}'), HttpCall(path="/continue_generation", body="{}")]


class Engine:
    """Notes what it is told; `silent`: never answers."""

    def __init__(self, silent: bool = False) -> None:
        self.heard: list[tuple[str, str, str | None]] = []
        self.released = threading.Event()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                engine.heard.append((self.path, body, self.headers["Authorization"]))
                if silent:
                    engine.released.wait(30)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> HostAndPort:
        return HostAndPort("127.0.0.1", self.server.server_port)

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def environ(tmp_path):
    security.create_secrets(tmp_path, 0)
    return {"MILES_HPC_RUN_DIR": str(tmp_path), "MILES_HPC_ATTEMPT": "0"}


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_over(farewell: Farewell) -> None:
    wait_until(lambda: farewell.over(0.0))


def test_the_calls_come_in_order_with_the_key_and_then_it_is_over(environ, tmp_path):
    engine = Engine()
    wait_over(Farewell(engine.address, CALLS, environ, until=1e9))
    key = f"Bearer {security.load_http_key(tmp_path, 0)}"
    assert engine.heard == [(call.path, call.body, key) for call in CALLS]
    engine.close()


def test_one_that_is_not_there_or_a_key_that_is_missing_ends_it_at_once(environ):
    wait_over(Farewell(HostAndPort("127.0.0.1", 9), CALLS, environ, until=1e9))
    wait_over(Farewell(HostAndPort("127.0.0.1", 9), CALLS, {**environ, "MILES_HPC_ATTEMPT": "7"}, until=1e9))


@pytest.fixture
def node(tmp_path, environ):
    made = Node(tmp_path)
    made.now = 100.0
    made.table._clock = lambda: made.now
    made.reserve()
    made.start(ports=made.sent[-1].ports, probe=Probe(kind="tcp", port="http"), farewell=CALLS, env=environ)
    yield made
    made.close()


def told(monkeypatch, engine):
    monkeypatch.setattr("miles_hpc.agent.table.HostAndPort", lambda host, port: engine.address)


def test_a_ready_worker_is_told_before_it_is_stopped_and_silence_is_waited_out_only_briefly(node, monkeypatch):
    engine = Engine(silent=True)
    told(monkeypatch, engine)
    node.table.on_finding(Finding(W, g(1), "ready"))
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="why"))
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="again"))
    wait_until(lambda: engine.heard)
    node.table.advance()
    assert node.supervisor.stopped == [] and node.table.next_deadline() < node.now + 0.1
    node.now += FAREWELL_S
    node.table.advance()
    node.table.advance()
    assert node.supervisor.stopped == [(W, "stopped", "why", None)]
    assert len(engine.heard) == 1
    engine.close()


def test_a_fenced_worker_one_that_failed_or_is_not_ready_is_told_nothing(node, monkeypatch):
    engine = Engine()
    told(monkeypatch, engine)
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="not ready"))
    assert node.supervisor.stopped == [(W, "stopped", "not ready", None)]
    node.end(cause="stopped")
    node.supervisor.stopped.clear()
    node.reserve(2)
    ports = node.sent[-1].ports
    node.start(2, ports=ports, probe=Probe(kind="tcp", port="http"), farewell=CALLS, env={}, stateful=True)
    node.table.on_finding(Finding(W, g(2), "ready"))
    node.table.fence("alone")
    assert node.supervisor.stopped == [(W, "exited", "alone", 0.0)] and engine.heard == []
    engine.close()


def test_a_stop_whose_grace_is_cut_tells_nothing(node, monkeypatch):
    engine = Engine()
    told(monkeypatch, engine)
    node.table.on_finding(Finding(W, g(1), "ready"))
    node.table.stop_all("the job ends", 2.0)
    assert node.supervisor.stopped == [(W, "stopped", "the job ends", 2.0)] and engine.heard == []
    engine.close()


@pytest.mark.parametrize("grace", [0.0, 2.0])
def test_a_stop_with_a_shorter_grace_ends_a_farewell(node, monkeypatch, grace):
    engine = Engine(silent=True)
    told(monkeypatch, engine)
    node.table.on_finding(Finding(W, g(1), "ready"))
    node.table.on_stop(StopWorker(worker=W, generation=g(1), reason="why"))
    node.table.stop_all("now", grace)
    assert node.supervisor.stopped == [(W, "stopped", "now", grace)]
    node.now += FAREWELL_S
    node.table.advance()
    assert len(node.supervisor.stopped) == 1
    engine.close()
