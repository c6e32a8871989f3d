"""The doctor on all nodes of an allocation: each reports into a shared directory, then tries to reach every other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from miles_hpc.launch.allocation import Task
from miles_hpc.launch.checks import Finding, NodeReport, own_report
from miles_hpc.launch.slurm_options import SRUN

SHARED_WITHIN_S = 20.0
CONNECT_WITHIN_S = 3.0
STEP_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1
_CONNECTING = 64
"""Nodes that one node tries to reach at a time."""


def run_on_nodes(directory: Path) -> tuple[list[NodeReport], dict[str, float], list[Finding]]:
    """Start one task on every node of this allocation. Returns reports, clock skews by host, and what went wrong.

    The step is given no CPU options of its own, but what the batch script would give: binding is part of the test.
    """
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".doctor-") as place:
        argv = ["srun", "--overlap", *SRUN, *([f"--cpus-per-task={cpus}"] if cpus else []),
                sys.executable, "-m", "miles_hpc.cli", "doctor", "--node", place]  # fmt: skip
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=STEP_WITHIN_S, check=False)
            said = " ".join(done.stderr.split())[-300:]
        except subprocess.TimeoutExpired:
            said = f"the step took more than {STEP_WITHIN_S:g} s"
        reports = [msgspec.json.decode(path.read_bytes(), type=NodeReport) for path in Path(place).glob("*.done")]
        skews = {
            report.host: report.wall_s - (Path(place) / f"{report.index}.json").stat().st_mtime for report in reports
        }
    wanted = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    missing = []
    if len(reports) < wanted:
        missing.append(
            Finding(
                check="step",
                level="fail",
                text=f"{len(reports)} of {wanted} nodes reported: {said}",
                remedy="does srun work in this allocation, and do all nodes see this directory?",
            )
        )
    reports.sort(key=lambda report: report.index)
    base = skews[reports[0].host] if reports else 0.0
    return reports, {host: skew - base for host, skew in skews.items()}, missing


def on_node(place: Path) -> int:
    """One node's part. Returns 0."""
    task = Task.from_environ()
    with socket.create_server(("", 0), backlog=128) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        report = own_report(task.index, place, server.getsockname()[1])
        _write(place / f"{task.index}.json", report)
        others, absent = _others(place, task)
        found = [*report.findings, *absent, *reach(others)]
        _write(place / f"{task.index}.done", msgspec.structs.replace(report, findings=found))
        # The others still try to reach this node.
        _wait(lambda: len(list(place.glob("*.done"))) >= task.nodes, SHARED_WITHIN_S)
    return 0


def _others(place: Path, task: Task) -> tuple[list[NodeReport], list[Finding]]:
    """The other nodes' reports; a node whose file does not come is named."""
    wanted = {index for index in range(task.nodes) if index != task.index}
    started = time.monotonic()
    _wait(lambda: wanted <= {int(path.stem) for path in place.glob("*.json")}, SHARED_WITHIN_S)
    seen = [index for index in sorted(wanted) if (place / f"{index}.json").exists()]
    late = [task.hosts[index] for index in sorted(wanted - set(seen))]
    reports = [msgspec.json.decode((place / f"{index}.json").read_bytes(), type=NodeReport) for index in seen]
    took = time.monotonic() - started
    if late:
        return reports, [
            Finding(
                check="shared",
                level="fail",
                text=f"files of {', '.join(late)} are not seen after {took:.0f} s",
                remedy="put run directories on a file system that all nodes share",
            )
        ]
    return reports, [Finding(check="shared", level="ok", text=f"files of all nodes were seen within {took:.1f} s")]


def reach(others: Sequence[NodeReport]) -> list[Finding]:
    """Connect to every other node, at one of its addresses at least."""
    # Side by side: one address behind a firewall costs seconds, and in a large allocation every node has one.
    with ThreadPoolExecutor(_CONNECTING) as pool:
        answers = list(pool.map(_reaches, others))
    lost = [
        f"{other.host} ({', '.join(other.addresses) or 'no address'})"
        for other, answered in zip(others, answers, strict=True)
        if not answered
    ]
    if lost:
        return [
            Finding(
                check="mesh",
                level="fail",
                text=f"no TCP connection to {', '.join(lost)}",
                remedy="set network.interface or network.subnet to the network between nodes, and open its ports",
            )
        ]
    return [Finding(check="mesh", level="ok", text=f"{len(others)} other nodes can be reached")]


def _reaches(other: NodeReport) -> bool:
    return any(_connects(address, other.port) for address in other.addresses)


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_WITHIN_S).close()
    except OSError:
        return False
    return True


def _accept(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def _wait(ready: Callable[[], bool], timeout_s: float) -> None:
    deadline, never = time.monotonic() + timeout_s, threading.Event()
    while not ready() and time.monotonic() < deadline:
        never.wait(_LOOK_EVERY_S)


def _write(target: Path, report: NodeReport) -> None:
    # Not a name that ends as the files do: the other nodes look for those, and a glob shows hidden ones.
    draft = target.with_name(f"{target.name}.draft")
    draft.write_bytes(msgspec.json.encode(report))
    draft.replace(target)
