"""A run on this machine: one warden per node, each on an address of its own, all ending with this process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.agent import procfs
from miles_hpc.config.schema import Config
from miles_hpc.launch.attempts import Attempt
from miles_hpc.wire.ids import node_id

log = logging.getLogger(__name__)

WARDEN = Path(procfs.__file__).with_name("warden.py")
STOP_DEADLINE = 10.0
LEAVE_PATIENCE = 20.0
"""Seconds that the wardens have to end by themselves once there is a verdict."""
CRASH_PATIENCE = 1.0
"""Seconds in which a verdict may still appear after a warden has ended without one."""
_PASS_INTERVAL = 0.05


class LocalNode(msgspec.Struct):
    """One node of a local run."""

    node: str
    address: str
    warden: subprocess.Popen[bytes]


class LocalRun:
    """A started local run. Owned by the thread that started it: the wardens end when that thread does.

    A context manager: leaving it stops everything.
    """

    def __init__(self, run_dir: Path, attempt: Attempt, nodes: list[LocalNode]) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self.nodes = nodes
        self._crashed_at: float | None = None

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("the command ends")

    @property
    def verdict_path(self) -> Path:
        return self.run_dir / "verdicts" / f"attempt-{self.attempt.number}.json"

    def verdict(self) -> dict[str, Any] | None:
        """The hub's verdict of this attempt, if there is one."""
        try:
            found: dict[str, Any] = msgspec.json.decode(self.verdict_path.read_bytes())
        except FileNotFoundError:
            return None
        return found

    def poll(self) -> dict[str, Any] | None:
        """The verdict, or None while the run goes on.

        A run whose first node gave up without one, or whose nodes are all gone, is stopped and gets
        `{"outcome": "failed", "reason", "exit_code": 1}`; nothing of it is on disk then.
        """
        found = self.verdict()
        if found is not None:
            return found
        codes = [node.warden.poll() for node in self.nodes]
        # A node that was killed is succeeded by another one; a first node that gave up had a reason for all.
        if None in codes and (codes[0] is None or codes[0] < 0):
            return None
        if self._crashed_at is None:
            self._crashed_at = time.monotonic()
        if time.monotonic() - self._crashed_at < CRASH_PATIENCE and codes[0] == 0:
            return None
        reason = self._why_ended(codes)
        self.stop(reason)
        return self.verdict() or {"outcome": "failed", "reason": reason, "exit_code": 1, "attempt": self.attempt.number}

    def _why_ended(self, codes: list[int | None]) -> str:
        for node, code in zip(self.nodes, codes, strict=True):
            if code is not None:
                said = last_leaving(self.run_dir, self.attempt.number, node.node)
                return f"{node.node} ended with exit code {code}: {said}" if said else self._crash_text(node, code)
        return "the run was stopped"

    def _crash_text(self, node: LocalNode, code: int) -> str:
        path = warden_log(self.run_dir, self.attempt.number, node.node)
        try:
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        last = f": {lines[-1]}" if lines else ""
        return f"the agent of {node.node} ended with exit code {code} (log {path}){last}"

    def wait(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the verdict and then for all nodes to end. None: `timeout_s` was over before there was a verdict."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found = self.poll()
        while found is None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            self._wait_for_a_warden(_PASS_INTERVAL)
            found = self.poll()
        leave = time.monotonic() + LEAVE_PATIENCE
        while self.alive() and time.monotonic() < leave:
            self._wait_for_a_warden(_PASS_INTERVAL)
        self.stop("the run has its verdict")
        return found

    def _wait_for_a_warden(self, timeout_s: float) -> None:
        running = self.alive()
        if running:
            try:
                running[0].warden.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return

    def alive(self) -> list[LocalNode]:
        """Nodes whose warden runs."""
        return [node for node in self.nodes if node.warden.poll() is None]

    def stop(self, reason: str, deadline_s: float = STOP_DEADLINE) -> None:
        """Stop every node, the hard way shortly before `deadline_s`, and leave no process of the run.

        The hub writes a verdict on the way when there is time. Does nothing when all have ended. `reason` is logged.
        """
        running = self.alive()
        if running:
            log.info("stopping the run: %s", reason)
        deadline = time.monotonic() + deadline_s
        for node in running:
            node.warden.terminate()
        kill_at = deadline - min(1.0, deadline_s / 4)
        while self.alive() and time.monotonic() < kill_at:
            self._wait_for_a_warden(_PASS_INTERVAL)
        # A warden that kills everything below it finds also what carries no marker; killing the warden would not.
        for node in self.alive():
            node.warden.send_signal(signal.SIGQUIT)
        while self.alive() and time.monotonic() < deadline:
            self._wait_for_a_warden(_PASS_INTERVAL)
        for node in self.alive():
            node.warden.kill()
        for node in self.nodes:
            node.warden.wait()
        # Wardens leave nothing behind; what is found here outlived a warden that was killed.
        while (left := self._leftovers()) and time.monotonic() < deadline + STOP_DEADLINE:
            procfs.kill_all(left)
            threading.Event().wait(_PASS_INTERVAL)

    def _leftovers(self) -> list[procfs.Process]:
        prefix = f"{self.attempt.run_id}/{self.attempt.number}/"
        return procfs.marked(procfs.snapshot(), prefix, str(self.run_dir), skip=[os.getpid()])

    def leftovers(self) -> list[tuple[int, str]]:
        """(pid, command) of every living process that carries this attempt's marker."""
        return [(process.pid, procfs.command_line(process.pid)) for process in self._leftovers()]


def warden_log(run_dir: Path, attempt: int, node: str) -> Path:
    """Where a node's warden, and the agent's own stderr, go."""
    return run_dir / "logs" / f"attempt-{attempt}" / node / "warden.log"


def last_leaving(run_dir: Path, attempt: int, node: str) -> str:
    """Why the node's agent left, in its own words; "" when it did not say."""
    path = run_dir / "logs" / f"attempt-{attempt}" / node / "agent.jsonl"
    reason = ""
    try:
        for line in path.read_bytes().splitlines():
            if b'"event":"leaving"' in line:
                reason = str(msgspec.json.decode(line).get("reason", ""))
    except (OSError, msgspec.MsgspecError):
        return reason
    return reason


def local_address(index: int) -> str:
    """Address of a local node: 127.0.0.2 and up, so that nodes share no port."""
    if not 0 <= index <= 252:
        raise ValueError(f"local node {index} is outside 0..252")
    return f"127.0.0.{index + 2}"


def start_local(config: Config, run_dir: Path, attempt: Attempt) -> LocalRun:
    """Start the nodes of a run on this machine; the first one starts the hub.

    To be called by the main thread: the kernel ends the wardens (PDEATHSIG) when the thread that started them ends.

    Raises:
        RuntimeError: when called by another thread.
        OSError: when a warden cannot be started; none is left then.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("start_local must be called by the main thread: a run ends with the thread that started it")
    run_dir = run_dir.resolve()
    run = LocalRun(run_dir, attempt, [])
    try:
        for index in range(config.cluster.local_nodes):
            run.nodes.append(_start_node(config, run_dir, attempt, index))
    except BaseException:
        run.stop("a node could not be started")
        raise
    return run


def _start_node(config: Config, run_dir: Path, attempt: Attempt, index: int) -> LocalNode:
    node, address = node_id(index), local_address(index)
    output_path = warden_log(run_dir, attempt.number, node)
    output_path.parent.mkdir(parents=True, exist_ok=True)
    agent = [sys.executable, "-m", "miles_hpc.agent.run", "--run-dir", str(run_dir), "--run-id", attempt.run_id]
    agent += ["--attempt", str(attempt.number), "--node-index", str(index), "--address", address]
    agent += ["--local-nodes", str(config.cluster.local_nodes)]
    if index == 0:
        agent.append("--hub")
    argv = [sys.executable, "-I", "-S", str(WARDEN), "--run-id", attempt.run_id, "--run-dir", str(run_dir)]
    argv += ["--attempt", str(attempt.number), "--node", node, "--die-with", str(os.getpid()), "--", *agent]
    env = procfs.worker_environ(os.environ)
    env[procfs.MARK] = f"{attempt.run_id}/{attempt.number}/{node}/0/warden/g0-0"
    env[procfs.RUN_DIR] = str(run_dir)
    with output_path.open("ab") as output:
        warden = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return LocalNode(node, address, warden)
