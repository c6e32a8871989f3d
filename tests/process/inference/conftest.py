"""The real router, fake engines, and programs of ours as processes, under a hub that only keeps the address book."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config, InferenceConfig, MakeModelConfig, ModelConfig
from miles_hpc.specs.base import CommandWorkerSpec, LaunchCommandContext
from miles_hpc.specs.engine import engine_specs
from miles_hpc.specs.router import router_specs
from miles_hpc.train.make_model import make_model
from miles_hpc.wire import rendezvous, security
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation, parse_cell_id, worker_id
from miles_hpc.wire.messages import CellAddrs, ClientHello, ClientWelcome, PoolAddrs, ReplaceCell
from miles_hpc.wire.sockets import HubSocket
from miles_hpc.wire.worker_env import WorkerEnv

HOST = "127.0.0.1"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class BookHub(threading.Thread):
    """Publishes whatever address book the test sets, over the real wire, and notes requests for replacement."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        security.create_secrets(run_dir, 0)
        keys = security.KeyPair.generate()
        roles = security.role_keys(run_dir, 0)
        self._socket = HubSocket(HostAndPort(HOST, 0), run_id="run", keys=keys, roles=roles)
        rendezvous.publish(
            run_dir,
            rendezvous.Rendezvous(
                run_id="run",
                attempt=0,
                epoch=1,
                addresses=[HOST],
                port=self._socket.port,
                public_key=keys.public,
                digest="d",
            ),
        )
        self.pools: dict[str, list[CellAddrs]] = {}
        self.replaced: list[ReplaceCell] = []
        self._revision = 0
        self._sent: dict[bytes, int] = {}
        self._ending = threading.Event()

    def put(self, cell: CellAddrs) -> None:
        pool = parse_cell_id(cell.cell)[0]
        others = [c for c in self.pools.get(pool, []) if c.cell != cell.cell]
        self.pools = {**self.pools, pool: sorted([*others, cell], key=lambda c: c.cell)}
        self._revision += 1

    def drop(self, cell: str) -> None:
        pool = parse_cell_id(cell)[0]
        self.pools = {**self.pools, pool: [c for c in self.pools[pool] if c.cell != cell]}
        self._revision += 1

    def run(self) -> None:
        while not self._ending.is_set():
            for peer, _, message in self._socket.drain():
                if isinstance(message, ClientHello):
                    self._socket.send(peer, ClientWelcome(epoch=1, run_id="run", attempt=0))
                    self._sent[peer] = -1
                elif isinstance(message, ReplaceCell):
                    self.replaced.append(message)
            for peer, revision in self._sent.items():
                if revision != self._revision:
                    self._sent[peer] = self._revision
                    self._socket.send(peer, PoolAddrs(revision=self._revision, pools=self.pools))
            self._socket.socket.poll(20)
        self._socket.close()

    def stop(self) -> None:
        self._ending.set()
        self.join(5)


class Program:
    """One process and what it was started with."""

    def __init__(self, cell: str, n: int, ports: dict[str, int], process: subprocess.Popen[bytes], log: Path) -> None:
        self.cell, self.n, self.ports, self.process, self.log = cell, n, ports, process, log

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports['http']}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


class Fleet:
    """What a test started. `heal` starts a killed program again on its old ports, as the hub and agents would."""

    def __init__(self, run_dir: Path, *, config: Config | None = None, **inference: Any) -> None:
        self.run_dir = run_dir
        model = make_model(MakeModelConfig(), 0, run_dir / "model")
        self.config = config or Config(
            inference=InferenceConfig(engine="fake", **({"request_timeout_s": 30.0} | inference)),
        )
        self.config = msgspec.structs.replace(self.config, model=ModelConfig(path=str(model)))
        write_resolved(self.config, run_dir)
        self.hub = BookHub(run_dir)
        self.hub.start()
        self.programs: list[Program] = []

    # ------------------------------------------------------------------------------------------------- starting
    def router(self, *, ports: dict[str, int] | None = None, n: int = 1, listed: bool = True) -> Program:
        program = self.from_spec(router_specs(self.config)[0], 0, ports=ports, n=n)
        return self._listed(program, "/liveness", listed)

    def real_engine(
        self, index: int, *, ports: dict[str, int] | None = None, n: int = 1, listed: bool = True, wait: bool = True
    ) -> Program:
        """The engine of the config, by its spec."""
        program = self.from_spec(engine_specs(self.config)[0], index, ports=ports, n=n)
        return self._listed(program, "/health" if wait else "", listed)

    def from_spec(
        self, spec: CommandWorkerSpec, index: int, *, ports: dict[str, int] | None = None, n: int = 1
    ) -> Program:
        """One worker of a spec, started with the command and environment that a hub would order."""
        ports = ports or {port.name: free_port() for port in spec.port_infos}
        addresses = {name: HostAndPort(HOST, port) for name, port in ports.items()}
        context = LaunchCommandContext(
            cell_index=index,
            worker_index=0,
            local_gpu_ids=(),
            self_addrs=addresses,
            cell_addrs=(addresses,),
            pool_addrs={},
            run_dir=str(self.run_dir),
            attempt=0,
        )
        return self._start(f"{spec.name}-{index:05d}", n, ports, spec.launch_command(context), spec.env(context))

    def engine(
        self, index: int, *, ports: dict[str, int] | None = None, n: int = 1, token_ms: float = 1.0, listed: bool = True
    ) -> Program:
        ports = ports or {"http": free_port()}
        argv = [sys.executable, "-m", "miles_hpc.engine.fake", "--host", HOST, "--port", str(ports["http"])]
        argv += ["--model-path", self.config.model.path, "--token-ms", str(token_ms)]
        program = self._start(f"engine-policy-0-{index:05d}", n, ports, argv, {})
        return self._listed(program, "/health", listed)

    def controller(self, n: int = 1) -> Program:
        argv = [sys.executable, "-m", "miles_hpc.inference.run_controller"]
        program = self._start("controller-00000", n, {"rpc": free_port()}, argv, {})
        return self._listed(program, "", True)

    def session_server(self, index: int, *, ports: dict[str, int] | None = None, n: int = 1) -> Program:
        argv = [sys.executable, "-m", "miles_hpc.session.serve"]
        program = self._start(f"session-server-{index:05d}", n, ports or {"http": free_port()}, argv, {})
        return self._listed(program, "/health", True)

    def _start(self, cell: str, n: int, ports: dict[str, int], argv: list[str], env: dict[str, str]) -> Program:
        pool, index = parse_cell_id(cell)
        addresses = {name: HostAndPort(HOST, port) for name, port in ports.items()}
        identity = WorkerEnv(
            run_dir=self.run_dir,
            attempt=0,
            worker=worker_id(cell, 0),
            pool=pool,
            cell_index=index,
            worker_index=0,
            generation=Generation(1, n),
            node="node-00000",
            listen=addresses,
            master=addresses,
            cell_size=1,
        )
        log = self.run_dir / f"{cell}.g1-{n}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **identity.to_environ(), **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        program = Program(cell, n, ports, process, log)
        self.programs.append(program)
        return program

    def _listed(self, program: Program, path: str, listed: bool) -> Program:
        if listed:
            self.put(program)
        if path:
            wait_http(program, path)
        return program

    def put(self, program: Program, ready: bool = True) -> None:
        """Into the address book."""
        self.hub.put(
            CellAddrs(
                cell=program.cell,
                generation=Generation(1, program.n),
                node="node-00000",
                ready=ready,
                workers=[{name: HostAndPort(HOST, port) for name, port in program.ports.items()}],
                meta={"gpu_offset": parse_cell_id(program.cell)[1]},
            )
        )

    def kill(self, program: Program, *, told: bool = True) -> None:
        """SIGKILL, and tell the address book as a hub does at once; or not, as when the hub is slow."""
        program.kill()
        if told:
            self.hub.drop(program.cell)

    # -------------------------------------------------------------------------------------------------- looking
    @property
    def pools(self) -> dict[str, list[CellAddrs]]:
        return self.hub.pools

    @property
    def env(self) -> WorkerEnv:
        """Identity of the test itself, as the driver's."""
        return WorkerEnv(
            run_dir=self.run_dir,
            attempt=0,
            worker="driver-00000-00000",
            pool="driver",
            cell_index=0,
            worker_index=0,
            generation=Generation(1, 1),
            node="node-00000",
            listen={},
            master={},
            cell_size=1,
        )

    def weights(self, version: int) -> str:
        directory = self.run_dir / "weights" / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text("{}")
        return str(directory)

    def listed_by(self, router: Program) -> set[str]:
        return {w["url"] for w in get_json(f"{router.url}/workers", self.key)["workers"] if w["is_healthy"]}

    def running(self, engine: Program) -> int:
        """Requests that an engine runs at this moment."""
        return int(get_json(f"{engine.url}/v1/loads", self.key)["loads"][0]["num_running_reqs"])

    @property
    def key(self) -> str:
        """The run's HTTP key."""
        return security.load_http_key(self.run_dir, 0)

    def stop(self) -> None:
        for program in self.programs:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait(10)
        self.hub.stop()


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get_json(url: str, key: str = "") -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with _direct.open(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return json.loads(answer.read())


def wait_http(program: Program, path: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _direct.open(program.url + path, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if program.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{program.cell} did not come up:\n{program.log.read_text()[-3000:]}")
        time.sleep(0.05)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


@pytest.fixture
def make_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    # A site's proxy must change nothing: neither ours nor the router's calls may go through it.
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    fleets: list[Fleet] = []

    def make(**inference: Any) -> Fleet:
        run_dir = tmp_path / f"run-{len(fleets)}"
        run_dir.mkdir()
        fleets.append(Fleet(run_dir, **inference))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.stop()


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture(name="free_port")
def free_port_fixture() -> Callable[[], int]:
    return free_port
