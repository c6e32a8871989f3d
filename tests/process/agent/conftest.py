"""A hub that does as it is told: the real hub socket and rendezvous, driven by the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from miles_hpc.agent import procfs
from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation, node_id
from miles_hpc.wire.messages import (
    AgentHello,
    Heartbeat,
    Message,
    PortInfo,
    PortsReserved,
    Probe,
    Refused,
    ReservePorts,
    Shutdown,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from miles_hpc.wire.rendezvous import Rendezvous, publish
from miles_hpc.wire.security import KeyPair, create_secrets, role_keys
from miles_hpc.wire.sockets import HubSocket

M = TypeVar("M", bound=Message)
WARDEN = Path(procfs.__file__).with_name("warden.py")
NOTHING = Probe()


class FakeHub:
    """Sends what the test orders to the agents of one run, and keeps what they report."""

    def __init__(self, run_dir: Path, run_id: str, *, heartbeat: float = 0.2, epoch: int = 1) -> None:
        self.run_dir, self.run_id, self.epoch = run_dir, run_id, epoch
        self.taken: set[str] = set()
        """Nodes whose hello is refused as `node_taken`."""
        self.refused: list[AgentHello] = []
        self.peers: dict[str, bytes] = {}
        self.hellos: dict[str, AgentHello] = {}
        self.heard: list[tuple[str, Message]] = []
        self._heartbeat = heartbeat
        keys = KeyPair.generate()
        self.socket = HubSocket(
            HostAndPort("127.0.0.1", 0),
            run_id=run_id,
            keys=keys,
            roles=role_keys(run_dir, 0),
            domain=f"test-{run_id}-{id(self)}",
        )
        self.rendezvous = Rendezvous(
            run_id=run_id,
            attempt=0,
            epoch=epoch,
            addresses=["127.0.0.1"],
            port=self.socket.port,
            public_key=keys.public,
        )

    def publish(self) -> None:
        publish(self.run_dir, self.rendezvous)

    def close(self) -> None:
        self.socket.close()

    def pump(self, timeout_s: float = 0.05) -> None:
        self.socket.socket.poll(int(timeout_s * 1000))
        for peer, _, message in self.socket.drain():
            if isinstance(message, AgentHello):
                node = node_id(message.node_index)
                if node in self.taken:
                    self.refused.append(message)
                    self.socket.send(peer, Refused(code="node_taken", text="the test says so"))
                    continue
                self.peers[node] = peer
                self.hellos[node] = message
                self.send(
                    node,
                    Welcome(node=node, epoch=self.epoch, heartbeat=self._heartbeat, run_id=self.run_id, attempt=0),
                )
            node = next((name for name, known in self.peers.items() if known == peer), "?")
            self.heard.append((node, message))

    def send(self, node: str, message: Message) -> None:
        assert self.socket.send(self.peers[node], message)

    def until(self, found: Callable[[], M | bool | None], what: str, timeout_s: float = 40.0) -> M:
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s; heard {self.heard[-20:]}"
            self.pump()
        return value  # type: ignore[return-value]

    def reports(self, kind: type[M], worker: str = "", generation: Generation | None = None) -> list[M]:
        """What was heard, of exits those of which nothing is left."""
        return [
            message
            for _, message in self.heard
            if isinstance(message, kind)
            and (not worker or getattr(message, "worker", "") == worker)
            and (generation is None or getattr(message, "generation", None) == generation)
            and getattr(message, "gone", True)
        ]

    def expect(
        self, kind: type[M], worker: str = "", generation: Generation | None = None, timeout_s: float = 40.0
    ) -> M:
        def newest() -> M | None:
            found = self.reports(kind, worker, generation)
            return found[-1] if found else None

        return self.until(newest, f"{kind.__name__} of {worker or 'anyone'}", timeout_s)

    # ---- orders
    def join(self, node: str = "node-00000") -> AgentHello:
        self.until(lambda: node in self.hellos, f"hello of {node}")
        return self.hellos[node]

    def reserve(
        self,
        worker: str,
        ports: list[PortInfo],
        n: int = 1,
        node: str = "node-00000",
        keep: dict[str, int] | None = None,
    ) -> PortsReserved:
        generation = Generation(1, n)
        self.send(node, ReservePorts(worker=worker, generation=generation, ports=ports, keep=keep or {}))
        return self.expect(PortsReserved, worker, generation)

    def start(
        self,
        worker: str,
        program: str,
        *,
        n: int = 1,
        node: str = "node-00000",
        ports: dict[str, int] | None = None,
        probe: Probe = NOTHING,
        stop_grace: float = 1.0,
        arguments: tuple[str, ...] = (),
        stateful: bool = False,
        gpu_uuids: list[str] | None = None,
        essential_processes: tuple[str, ...] = (),
    ) -> WorkerStarted:
        """Start Python source as a worker."""
        generation = Generation(1, n)
        self.send(
            node,
            StartWorker(
                worker=worker,
                generation=generation,
                argv=[sys.executable, "-c", program, *arguments],
                env={"MILES_HPC_RUN_DIR": str(self.run_dir), "MILES_HPC_WORKER": worker},
                ports=ports or {},
                probe=probe,
                stop_grace=stop_grace,
                stateful=stateful,
                gpu_uuids=gpu_uuids or [],
                essential_processes=list(essential_processes),
            ),
        )
        return self.expect(WorkerStarted, worker, generation)

    def ready(self, worker: str, n: int = 1, timeout_s: float = 40.0) -> WorkerReady:
        return self.expect(WorkerReady, worker, Generation(1, n), timeout_s)

    def stop(self, worker: str, n: int = 1, node: str = "node-00000", reason: str = "test") -> None:
        self.send(node, StopWorker(worker=worker, generation=Generation(1, n), reason=reason))

    def exited(self, worker: str, n: int = 1, timeout_s: float = 40.0) -> WorkerExited:
        return self.expect(WorkerExited, worker, Generation(1, n), timeout_s)

    def beats(self) -> list[Heartbeat]:
        return self.reports(Heartbeat)


class Nodes:
    """Wardens with real agents, started by the test and gone after it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run_id = run_dir.name
        self.wardens: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, index: int = 0, *agent_arguments: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a node. `prefix`: a command that execs the warden."""
        node = node_id(index)
        agent = [sys.executable, "-m", "miles_hpc.agent.run", "--run-dir", str(self.run_dir)]
        agent += ["--run-id", self.run_id, "--attempt", "0", "--node-index", str(index)]
        agent += ["--address", f"127.0.0.{index + 2}", *agent_arguments]
        argv = [sys.executable, "-I", "-S", str(WARDEN), "--run-id", self.run_id, "--run-dir", str(self.run_dir)]
        argv += ["--attempt", "0", "--node", node, "--die-with", str(os.getpid()), "--", *agent]
        full_env = {**os.environ, **(env or {}), procfs.RUN_DIR: str(self.run_dir)}
        full_env[procfs.MARK] = f"{self.run_id}/0/{node}/0/warden/g0-0"
        log = self.run_dir / "logs" / "attempt-0" / node / "warden.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            warden = subprocess.Popen(
                [*prefix, *argv],
                env=full_env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.wardens[node] = warden
        return warden

    def marked(self, worker: str = "", node: str = "") -> list[procfs.Process]:
        """Living processes of this run, of one node or one worker."""
        found = procfs.marked(procfs.snapshot(), f"{self.run_id}/0/{node}", str(self.run_dir))
        return [process for process in found if f"/{worker}" in procfs.mark_of(process.pid)[0]]

    def close(self) -> None:
        for warden in self.wardens.values():
            if warden.poll() is None:
                warden.terminate()
        for warden in self.wardens.values():
            warden.wait(15)
        procfs.kill_all(self.marked())


def eventually(condition: Callable[[], bool], timeout_s: float = 40.0) -> bool:
    """Poll a condition of the outside world."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / f"run-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    path.mkdir()
    write_resolved(Config(), path)
    create_secrets(path, 0)
    return path


@pytest.fixture
def nodes(run_dir: Path) -> Iterator[Nodes]:
    made = Nodes(run_dir)
    yield made
    made.close()


@pytest.fixture
def hub(run_dir: Path, nodes: Nodes) -> Iterator[FakeHub]:
    """A published fake hub; one node has joined when the test uses `node`."""
    made = FakeHub(run_dir, nodes.run_id)
    made.publish()
    yield made
    if made.socket.socket.closed:
        return
    for node in list(made.peers):
        if nodes.wardens.get(node) is not None and nodes.wardens[node].poll() is None:
            made.send(node, Shutdown(reason="the test is over"))
    made.pump(0.1)
    made.close()


@pytest.fixture
def node(hub: FakeHub, nodes: Nodes) -> AgentHello:
    nodes.start()
    return hub.join()
