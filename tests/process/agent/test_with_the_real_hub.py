"""Real hub, real agents, a pool of small programs: lost ports, workers that never work, strangers, 20 runs at once."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config, HealConfig
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import AgentHello, ClientHello, Refused, StatusReply, StopWorker
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.rendezvous import newest
from miles_hpc.wire.security import KeyPair, create_secrets, load_client
from miles_hpc.wire.sockets import HubError, HubLink, HubRefused, connect_hub

from .conftest import Nodes

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

T = TypeVar("T")
IDLE = "import signal; signal.pause()"
SERVES = """
import json, os, signal, socket
for address in json.loads(os.environ["MILES_HPC_LISTEN"]).values():
    host, _, port = address.rpartition(":")
    for offset in range(3):
        socket.create_server((host, int(port) + offset)).detach()
signal.pause()
"""
PORTS = [{"name": "http", "num_consecutive": 3}, {"name": "rpc", "num_consecutive": 3}]
NO_BACKOFF = HealConfig(budget=2, backoff_s=0.05)


class Run:
    """One run of one pool: its hub is a child of the test, its node has a warden."""

    def __init__(self, run_dir: Path, spec: dict[str, Any], heal: HealConfig = NO_BACKOFF) -> None:
        run_dir.mkdir()
        write_resolved(Config(heal=heal), run_dir)
        create_secrets(run_dir, 0)
        self.run_dir = run_dir
        argv = [sys.executable, str(Path(__file__).with_name("one_pool.py")), str(run_dir), "127.0.0.2"]
        with (run_dir / "hub.out").open("wb") as output:
            self.hub = subprocess.Popen([*argv, json.dumps(spec)], stdout=output, stderr=output)
        self.nodes = Nodes(run_dir)
        self.nodes.start()

    def status(self) -> StatusReply | None:
        try:
            with OperatorClient(self.run_dir, timeout_s=3.0) as operator:
                return operator.status()
        except (HubError, OSError):
            return None

    def until(self, found: Callable[[StatusReply], T], what: str, timeout_s: float = 60.0) -> T:
        """Ask the hub until it says something that is wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status is not None and (value := found(status)):
                return value
            assert time.monotonic() < deadline and self.hub.poll() is None, f"{what}: {status}"
            time.sleep(0.05)

    def ready(self, restarts: int | None = None) -> StatusReply:
        def all_ready(status: StatusReply) -> StatusReply | None:
            good = all(cell.state == "ready" and restarts in (None, cell.restarts) for cell in status.cells)
            return status if good else None

        return self.until(all_ready, "all cells ready")

    def verdict(self, timeout_s: float = 60.0) -> dict[str, Any]:
        assert self.hub.wait(timeout_s) == 0
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def close(self) -> None:
        if self.hub.poll() is None:
            self.hub.send_signal(signal.SIGTERM)
            try:
                self.hub.wait(20)
            except subprocess.TimeoutExpired:
                self.hub.kill()
                self.hub.wait()
        self.nodes.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(program: str, heal: HealConfig = NO_BACKOFF, **spec: Any) -> Run:
        name = f"run-{os.getpid()}-{secrets.token_hex(3)}"
        runs.append(Run(tmp_path / name, {"program": program, **spec}, heal))
        return runs[-1]

    yield start
    for run in runs:
        run.hub.send_signal(signal.SIGTERM) if run.hub.poll() is None else None
    for run in runs:
        run.close()


# -------------------------------------------------------------------------------------------------- ports
class Thief:
    """Takes the port that a worker is about to bind, as often as it is told to."""

    def __init__(self, path: Path, times: int) -> None:
        self.taken: list[socket.socket] = []
        self._times = times
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                host, _, port = worker.recv(100).decode().rpartition(":")
                if len(self.taken) < self._times:
                    self.taken.append(socket.create_server((host, int(port))))
                worker.sendall(b"go on")
                worker.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for taken in self.taken:
            taken.close()


ROBBED = """
import json, os, signal, socket
address = json.loads(os.environ["MILES_HPC_LISTEN"])["http"]
thief = socket.socket(socket.AF_UNIX)
thief.connect({path!r})
thief.sendall(address.encode())
thief.recv(10)
host, _, port = address.rpartition(":")
server = socket.create_server((host, int(port)))
signal.pause()
"""


@pytest.mark.parametrize("times", [3, 4])
def test_a_worker_whose_port_is_stolen_gets_another_three_times_at_most(start, tmp_path, times):
    thief = Thief(tmp_path / "thief", times)
    try:
        run = start(
            ROBBED.format(path=str(tmp_path / "thief")),
            HealConfig(budget=0),
            ports=[{"name": "http"}],
            probe={"kind": "tcp", "port": "http"},
            restart="fail_run",
        )
        if times == 3:
            (cell,) = run.ready(restarts=3).cells
            stolen = {server.getsockname()[1] for server in thief.taken}
            assert len(stolen) == 3 and cell.workers[0].ports["http"] not in stolen
        else:
            verdict = run.verdict()
            # The agent's own check before exec sees a thief first, or the worker does when it binds.
            assert verdict["outcome"] == "failed"
            assert "port_taken" in verdict["reason"] or "EADDRINUSE" in verdict["reason"]
    finally:
        thief.close()


def test_a_busy_fixed_port_ends_the_run_with_its_holder(start):
    with socket.create_server(("127.0.0.2", 0)) as holder:
        port = holder.getsockname()[1]
        run = start(IDLE, ports=[{"name": "http", "static_port": port, "allow_dynamic": False}])
        reason = run.verdict()["reason"]
        assert f"port {port}" in reason and f"pid {os.getpid()}" in reason


def test_twenty_runs_at_once_on_one_machine_all_come_up(start):
    """All their nodes have one address, all their workers six ports, and all agents choose at the same time."""
    runs = [start(SERVES, ports=PORTS, probe={"kind": "tcp", "port": "rpc"}) for _ in range(20)]
    found = [run.ready() for run in runs]
    ports = [first + i for status in found for first in status.cells[0].workers[0].ports.values() for i in range(3)]
    assert len(set(ports)) == 120
    assert sum(status.cells[0].restarts for status in found) == 0


# ---------------------------------------------------------------------------------- workers that never work
def test_a_worker_that_exits_at_once_always_ends_the_run_with_its_last_words(start):
    run = start("import sys; sys.exit('there is no model here')")
    verdict = run.verdict()
    assert verdict["outcome"] == "failed"
    assert "ended 3 times within 600 s" in verdict["reason"] and "there is no model here" in verdict["reason"]
    assert ".log" in verdict["reason"]


def test_a_worker_that_never_opens_its_port_ends_the_run_at_its_deadline(start):
    probe = {"kind": "tcp", "port": "http", "start_deadline": 0.7}
    run = start(IDLE, ports=[{"name": "http"}], probe=probe)
    verdict = run.verdict()
    assert verdict["outcome"] == "failed" and "start_deadline" in verdict["reason"]
    assert "Connection refused" in verdict["reason"] and "limit 0.7 s" in verdict["reason"]


# ---------------------------------------------------------------------------------------------- strangers
def test_garbage_half_open_peers_and_strangers_in_a_loop_cost_the_run_nothing(start):
    run = start(IDLE)
    run.ready()
    hub = newest(run.run_dir, 0)
    assert hub is not None
    address = ("127.0.0.2", hub.port)
    half_open = [socket.create_connection(address) for _ in range(50)]
    stop = threading.Event()

    def talk_nonsense() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, 1) as peer:
                peer.sendall(secrets.token_bytes(4096))
                peer.settimeout(0.2)
                peer.recv(1000)

    def knock() -> None:
        context = zmq.Context()
        while not stop.is_set():
            stranger = KeyPair.generate()
            link = HubLink(hub.endpoints[0], hub_key=hub.public_key, keys=stranger, run_id=hub.run_id, context=context)
            link.monitor.poll(500)
            link.close()
        context.term()

    threads = [threading.Thread(target=work) for work in (talk_nonsense, knock)]
    for thread in threads:
        thread.start()
    try:
        slowest = 0.0
        until = time.monotonic() + 5.0
        with OperatorClient(run.run_dir) as operator:
            while time.monotonic() < until:
                asked = time.monotonic()
                status = operator.status()
                slowest = max(slowest, time.monotonic() - asked)
                assert [node.state for node in status.nodes] == ["alive"]
        assert slowest < 2.0
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        for peer in half_open:
            peer.close()
    denied = run.until(lambda status: status.dropped.get("denied", 0), "the strangers in the status")
    assert denied > 10
    assert len(run.ready(restarts=0).cells) == 1


def test_a_worker_s_key_gives_no_orders_and_takes_nobody_s_place(start):
    run = start(IDLE)
    (cell,) = run.ready().cells
    hub = newest(run.run_dir, 0)
    worker_key = load_client(run.run_dir, 0, "worker")
    orders = [
        StopWorker(worker="pool-00000-00000", generation=cell.generation),
        AgentHello(
            incarnation="thief",
            node_index=0,
            node_key="k",
            host="h",
            pid=1,
            address="127.0.0.2",
            package_version="",
            digest="",
        ),
    ]
    link, _ = connect_hub(
        hub, worker_key, ClientHello(worker="pool-00000-00000", generation=cell.generation, pid=1), timeout_s=5
    )
    with link:
        for order in orders:
            assert link.send(order)
        codes: list[str] = []
        deadline = time.monotonic() + 10
        while len(codes) < 2:
            assert time.monotonic() < deadline, codes
            link.socket.poll(200)
            codes += [message.code for message in link.receive() if isinstance(message, Refused)]
        assert sorted(codes) == ["malformed", "role"]
    assert run.ready(restarts=0).cells[0].generation == Generation(1, 1)


def test_a_live_node_s_identity_is_refused_by_name_until_its_agent_is_suspect(start):
    run = start(IDLE)
    status = run.ready()
    agent = status.nodes[0]
    hub = newest(run.run_dir, 0)
    keys = load_client(run.run_dir, 0, "agent")
    hello = AgentHello(
        incarnation="another",
        node_index=0,
        node_key="k",
        host="elsewhere",
        pid=1,
        address="127.0.0.2",
        package_version=hub.version,
        digest=hub.digest,
    )
    with pytest.raises(HubRefused, match=f"taken by the agent with pid {agent.pid} on {agent.host}"):
        connect_hub(hub, keys, hello, timeout_s=5)
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        run.until(lambda status: status.nodes[0].state == "suspect", "a suspect node")
        link, _ = connect_hub(hub, keys, hello, timeout_s=5)
        link.close()
    finally:
        os.kill(agent.pid, signal.SIGCONT)
