"""A real hub process and scripted agents that talk to it over CURVE."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

import miles_hpc
from miles_hpc.config.load import write_resolved
from miles_hpc.config.node import NetworkConfig
from miles_hpc.config.schema import ClusterConfig, Config
from miles_hpc.config.timing import Timing
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    AgentHello,
    ClientHello,
    FullTable,
    Goodbye,
    Heartbeat,
    Message,
    PortsReserved,
    ReservePorts,
    Shutdown,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkerState,
)
from miles_hpc.wire.rendezvous import Rendezvous, wait_for_rendezvous
from miles_hpc.wire.security import create_secrets, load_client
from miles_hpc.wire.sockets import HubLink, connect_hub

PATIENCE_S = 20.0


class Peer:
    """One link to the hub that remembers what it was sent."""

    def __init__(self, hub: HubUnderTest, role: str, hello: Message) -> None:
        self.link, self.answer = connect_hub(
            hub.rendezvous, load_client(hub.run_dir, 0, role), hello, timeout_s=PATIENCE_S
        )
        self.got: list[Message] = []

    def send(self, message: Message) -> None:
        assert self.link.send(message)

    def take(self) -> None:
        for message in self.link.receive():
            self.got.append(message)
            self.react(message)

    def react(self, message: Message) -> None:
        """A client only listens."""

    def of(self, kind: type) -> list[Message]:
        return [message for message in self.got if isinstance(message, kind)]


class Agent(Peer):
    """Does at once what it is told; no process is started."""

    def __init__(self, hub: HubUnderTest, index: int, **changes: object) -> None:
        values: dict[str, object] = {
            "incarnation": f"i{index}",
            "node_index": index,
            "node_key": f"k{index}",
            "host": f"h{index}",
            "pid": 10 + index,
            "address": f"127.0.0.{index + 2}",
            "package_version": miles_hpc.__version__,
            "digest": hub.rendezvous.digest,
            "cpus": 2.0,
        }
        self.running: dict[str, StartWorker] = {}
        self.hanging: dict[str, StartWorker] = {}
        """Workers that do not end, whatever it does."""
        self.port = 30000 + 1000 * index
        super().__init__(hub, "agent", AgentHello(**{**values, **changes}))

    def react(self, message: Message) -> None:
        if isinstance(message, ReservePorts):
            ports = dict(message.keep)
            for info in message.ports:
                self.port += 1
                ports.setdefault(info.name, self.port)
            self.send(PortsReserved(worker=message.worker, generation=message.generation, ports=ports))
        elif isinstance(message, StartWorker):
            self.running[message.worker] = message
            self.send(WorkerStarted(worker=message.worker, generation=message.generation, pid=self.port))
            self.send(WorkerReady(worker=message.worker, generation=message.generation))
        elif isinstance(message, StopWorker) and message.worker not in self.hanging:
            self.running.pop(message.worker, None)
            self.send(WorkerExited(worker=message.worker, generation=message.generation, signal=15, cause="stopped"))
        elif isinstance(message, Shutdown):
            self.running.clear()
            self.send(Goodbye(reason=message.reason))

    def worker_hangs(self, worker: str) -> None:
        """Its first process ends, and something that it has started cannot be killed."""
        order = self.hanging[worker] = self.running.pop(worker)
        self.send(WorkerExited(worker=worker, generation=order.generation, exit_code=1, gone=False))

    def table(self) -> FullTable:
        """All that it has, and what hangs."""
        return FullTable(
            workers=[
                WorkerState(worker=name, generation=order.generation, state=state, pid=1, ports=order.ports)
                for orders, state in ((self.running, "ready"), (self.hanging, "stopping"))
                for name, order in orders.items()
            ]
        )

    def worker_dies(self, worker: str, **how: object) -> None:
        order = self.running.pop(worker)
        self.send(WorkerExited(worker=worker, generation=order.generation, **({"exit_code": 1} | how)))


class HubUnderTest:
    """The hub's process in a run directory of its own."""

    def __init__(
        self,
        run_dir: Path,
        nodes: int,
        parent: list[str] | None = None,
        timing: Timing | None = None,
        network: NetworkConfig | None = None,
    ) -> None:
        self.run_dir = run_dir
        config = Config(
            cluster=ClusterConfig(local_nodes=nodes), timing=timing or Timing(), network=network or NetworkConfig()
        )
        write_resolved(config, run_dir)
        create_secrets(run_dir, 0)
        argv = [sys.executable, "-m", "miles_hpc.hub.run", "--run-dir", str(run_dir), "--attempt", "0"]
        argv += ["--address", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*(parent or []), *argv], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.rendezvous: Rendezvous = wait_for_rendezvous(run_dir, 0, time.monotonic() + PATIENCE_S)
        self.peers: list[Peer] = []

    def agent(self, index: int, **changes: object) -> Agent:
        agent = Agent(self, index, **changes)
        self.peers.append(agent)
        return agent

    def client(self, worker: str, generation: Generation = Generation(1, 1)) -> Peer:  # noqa: B008
        peer = Peer(self, "worker", ClientHello(worker=worker, generation=generation, pid=1))
        peer.got.append(peer.answer)
        self.peers.append(peer)
        return peer

    def pump(self, until: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Let all peers take and answer messages, with a heartbeat each 0.5 s, until `until()` holds."""
        poller = zmq.Poller()
        for peer in self.peers:
            poller.register(peer.link.socket, zmq.POLLIN)
        deadline, beat_at, seq = time.monotonic() + timeout_s, 0.0, 0
        while not until():
            now = time.monotonic()
            assert now < deadline, f"{what}: not within {timeout_s} s; hub: {self.process.poll()}"
            if now >= beat_at:
                beat_at, seq = now + 0.5, seq + 1
                for peer in self.peers:
                    if isinstance(peer, Agent):
                        peer.link.send(Heartbeat(seq=seq))
            poller.poll(50)
            for peer in self.peers:
                peer.take()

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        self.pump(lambda: self.process.poll() is not None, "the hub's end", timeout_s)
        return self.process.returncode

    def close(self) -> None:
        for peer in self.peers:
            peer.link.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start_hub_in():
    """Start a hub in a given run directory."""
    hubs: list[HubUnderTest] = []

    def start(run_dir: Path, nodes: int = 1, **more: object) -> HubUnderTest:
        run_dir.mkdir()
        hubs.append(HubUnderTest(run_dir, nodes, **more))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


@pytest.fixture
def start_hub(tmp_path, start_hub_in):
    """Start a hub in a run directory of its own."""
    numbers = itertools.count()

    def start(nodes: int = 1, **more: object) -> HubUnderTest:
        return start_hub_in(tmp_path / f"run{next(numbers)}", nodes, **more)

    return start


@pytest.fixture
def raw_link():
    """A link that has said nothing yet."""
    links: list[HubLink] = []

    def connect(hub: HubUnderTest, role: str) -> HubLink:
        found = hub.rendezvous
        endpoint = (found.bulk_endpoints if role == "operator" else found.endpoints)[0]
        keys = load_client(hub.run_dir, 0, role)
        link = HubLink(endpoint, hub_key=hub.rendezvous.public_key, keys=keys, run_id=hub.rendezvous.run_id)
        links.append(link)
        assert link.monitor.poll(5000)
        return link

    yield connect
    for link in links:
        link.close()
