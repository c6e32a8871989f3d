"""Nodes as network namespaces on one bridge: links that can be cut, nodes that can be lost or frozen. Needs root."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.agent import procfs
from miles_hpc.cli.run import make_model_in, with_model
from miles_hpc.config.load import load, write_resolved
from miles_hpc.launch.attempts import claim_attempt
from miles_hpc.wire.ids import node_id
from miles_hpc.wire.security import create_secrets

from ..conftest import PACE, WholeRun, wait_for

WARDEN = Path(procfs.__file__).with_name("warden.py")

_made = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Namespaces:
    """One bridge with an address for the test itself, and a namespace with a link for each node."""

    def __init__(self, count: int) -> None:
        # Never a name twice: another mount namespace of the machine may hold on to a namespace that was deleted.
        tag = (os.getpid() * 16 + next(_made)) % 10_000
        self.subnet = f"10.{100 + tag // 250}.{tag % 250}"
        self.bridge = f"mhb{tag}"
        self.names = [f"mhn{tag}-{index}" for index in range(count)]
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.subnet}.1/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        self.outer = [f"mhv{tag}-{index}" for index in range(count)]
        for index, (name, outer) in enumerate(zip(self.names, self.outer, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outer, "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")

    def address(self, index: int) -> str:
        return f"{self.subnet}.{10 + index}"

    def cut(self, index: int) -> None:
        ip("-n", self.names[index], "link", "set", "eth0", "down")

    def join(self, index: int) -> None:
        ip("-n", self.names[index], "link", "set", "eth0", "up")

    def close(self) -> None:
        for words in (
            *(("link", "del", outer) for outer in self.outer),
            *(("netns", "del", name) for name in self.names),
            ("link", "del", self.bridge),
        ):
            subprocess.run(["ip", *words], check=False, capture_output=True)


class SpreadRun(WholeRun):
    """`smoke` on nodes that are namespaces and share one run directory; paced unless `sets` name a pace."""

    def __init__(self, run_dir: Path, nodes: int, *sets: str) -> None:
        super().__init__(run_dir)
        run_dir.mkdir(parents=True)
        config = with_model(load(["smoke"], [f"cluster.local_nodes={nodes}", PACE, *sets]), run_dir)
        make_model_in(config, run_dir)
        attempt = claim_attempt(run_dir)
        create_secrets(run_dir, attempt.number)
        write_resolved(config, run_dir)
        self.net = Namespaces(nodes)
        self.wardens: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(nodes):
                self.wardens.append(self._start(index, nodes, attempt.run_id))
        except BaseException:
            self.close()
            raise

    def _start(self, index: int, nodes: int, run_id: str) -> subprocess.Popen[bytes]:
        node = node_id(index)
        agent = [sys.executable, "-m", "miles_hpc.agent.run", "--run-dir", str(self.run_dir), "--run-id", run_id]
        agent += ["--attempt", "0", "--node-index", str(index), "--address", self.net.address(index)]
        agent += ["--local-nodes", str(nodes), *(["--hub"] if index == 0 else [])]
        argv = ["ip", "netns", "exec", self.net.names[index], sys.executable, "-I", "-S", str(WARDEN)]
        argv += ["--run-id", run_id, "--run-dir", str(self.run_dir), "--attempt", "0", "--node", node]
        argv += ["--die-with", str(os.getpid()), "--", *agent]
        env = {**procfs.worker_environ(os.environ), procfs.MARK: f"{run_id}/0/{node}/0/warden/g0-0"}
        env[procfs.RUN_DIR] = str(self.run_dir)
        log = self.run_dir / "logs" / "attempt-0" / node / "warden.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    # ------------------------------------------------------------------------------------------ looking
    def alive(self) -> bool:
        return any(warden.poll() is None for warden in self.wardens)

    def tail(self) -> str:
        parts = []
        for path in sorted((self.run_dir / "logs" / "attempt-0").rglob("*.jsonl")):
            parts.append(f"--- {path.relative_to(self.run_dir)}\n{path.read_text(errors='replace')[-2500:]}")
        return "\n".join(parts)

    def processes(self, index: int) -> list[procfs.Process]:
        return procfs.marked(procfs.snapshot(), f"{self.run_id}/0/{node_id(index)}/", str(self.run_dir))

    def hubs(self) -> list[int]:
        """Nodes on which a hub's process is."""
        return [
            index
            for index in range(len(self.wardens))
            if any("/hub/" in procfs.mark_of(process.pid)[0] for process in self.processes(index))
        ]

    def alive_nodes(self) -> int:
        """Nodes that the hub hears."""
        found = self.status()
        return 0 if found is None else sum(node.state == "alive" for node in found.nodes)

    def epochs(self) -> list[int]:
        return sorted(int(path.stem[-5:]) for path in (self.run_dir / "rendezvous" / "0").glob("epoch-*.json"))

    def node_of(self, cell: str) -> int:
        """Index of the node that a cell is on; waits for a cell that is between two."""

        def placed() -> str | None:
            assert self.alive(), f"the run ended before {cell} was on a node; {self.tail()}"
            row = self.cell(cell)
            return row.node or None if row is not None else None

        return int(wait_for(placed, f"{cell} to be on a node").rpartition("-")[2])

    def engines_on(self, index: int) -> set[int]:
        """Pids of the engines of a node, from the machine and not from a hub."""
        return {p.pid for p in self.processes(index) if "/engine-policy-0-" in procfs.mark_of(p.pid)[0]}

    def superseded_is_gone(self, index: int) -> bool:
        """Whether the node runs only what the hub has there."""
        found = self.status()
        if found is None:
            return False
        wanted = {worker.pid for row in found.cells if row.node == node_id(index) for worker in row.workers}
        marks = {process.pid: procfs.mark_of(process.pid)[0].split("/") for process in self.processes(index)}
        running = {pid for pid, mark in marks.items() if len(mark) > 4 and mark[4] not in ("warden", "agent", "hub")}
        return running <= wanted

    # ------------------------------------------------------------------------------------------ hurting
    def lose(self, index: int) -> None:
        """The node is gone: link down, then every process of it killed, as far as one is left."""
        self.net.cut(index)
        while found := self.processes(index):
            procfs.kill_all(found)
        self.wardens[index].wait(10)

    def freeze(self, index: int, number: int = signal.SIGSTOP) -> None:
        for process in self.processes(index):
            os.kill(process.pid, number)

    def thaw(self, index: int) -> None:
        self.freeze(index, signal.SIGCONT)

    # ------------------------------------------------------------------------------------------ the end
    def end(self, timeout_s: float = 150.0) -> dict[str, Any]:
        """Wait for the verdict and for all nodes to leave; returns the summary."""
        verdict = self.run_dir / "verdicts" / "attempt-0.json"

        def decided() -> bool:
            assert verdict.exists() or self.alive(), self.tail()
            return verdict.exists()

        wait_for(decided, "the verdict", timeout_s)
        for warden in self.wardens:
            warden.wait(60)
        return dict(msgspec.json.decode(verdict.read_bytes()))

    def close(self) -> None:
        for index in range(len(self.wardens)):
            self.thaw(index)
        for warden in self.wardens:
            if warden.poll() is None:
                warden.terminate()
        for warden in self.wardens:
            try:
                warden.wait(20)
            except subprocess.TimeoutExpired:
                warden.kill()
                warden.wait()
        procfs.kill_all(procfs.marked(procfs.snapshot(), f"{self.run_dir.name}/", str(self.run_dir)))
        self.net.close()
