"""One run whose five engines are hurt in every way, under requests of a client outside: all of them are answered, and
at the end there are the processes, ports, places and entries of the beginning."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from miles_hpc.agent import procfs
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.rpc import RpcError

from ..conftest import wait_for
from .clients import Book, Outside, whole

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

ENGINES = 5
ROUNDS = 10
"""Of stopping and starting all engines: 50 stops and starts."""
SETTINGS = (
    "steps=100000",
    f"inference.engines={ENGINES}",
    # An answer takes a good half second, so the blow falls in the middle of it.
    "inference.fake_token_ms=150",
    "rollout.batch_size=4",
    "heal.budget=100",
    "heal.quarantine=0",
    "heal.backoff_s=0.1",
    "session.servers=1",
)


@pytest.fixture
def run(smoke):
    return smoke(*SETTINGS)


def test_engines_lost_together_at_start_in_windows_and_stopped_fifty_times_leave_nothing(run):
    run.reach(2)
    book = Book(run)
    try:
        wait_for(lambda: len(book.engines) == ENGINES and book.router, "engines and the router")
        before = footprint(run)
        assert before["processes"]["engine-policy-0"] == ENGINES
        asyncio.run(all_engines_die_at_once(run, book))
        engine_dies_while_it_starts(run)
        asyncio.run(hub_and_controller_die_inside_a_window(run, book))
        asyncio.run(stopped_and_started(run, book))
        run.reach(run.step() + 2)
        run.pids("engine-policy-0")
        with contextlib.suppress(AssertionError):
            wait_for(lambda: footprint(run) == before, "the footprint of the beginning", 20)
        after = footprint(run)
        assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {}
        listed = asyncio.run(listed_by_the_router(book))
        assert listed == sorted(book.engines.values()) and len(listed) == ENGINES
        with OperatorClient(run.run_dir) as operator:
            operator.drain("enough")
    finally:
        book.close()
    groups = run.end()["groups"]
    assert groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())
    versions = [row["weight_version"] for row in run.metrics()]
    assert versions == sorted(set(versions)) and run.left() == []


async def all_engines_die_at_once(run, book):
    async with Outside(book) as client:
        found = await asyncio.to_thread(run.pids, "engine-policy-0")
        calls = client.begin()
        await client.in_flight(calls, ENGINES, each=2)
        for pids in found.values():
            os.kill(pids[0], signal.SIGKILL)
        assert whole(await calls) and client.generate.retries > 0
    await asyncio.to_thread(run.reach, run.step() + 2)


def engine_dies_while_it_starts(run):
    cell = "engine-policy-0-00001"
    with OperatorClient(run.run_dir) as operator:
        row = run.cell(cell)
        operator.restart_cell(cell, row.generation, "to be met at its start")

    def starting():
        found = run.cell(cell)
        return found if found.generation != row.generation and found.state == "starting" else None

    started = wait_for(starting, "its next generation to start")
    pid = wait_for(lambda: run.process_of(f"{cell}-00000"), "its process")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: run.cell(cell).generation.n > started.generation.n, "the generation after that")
    run.reach(run.step() + 2)


async def hub_and_controller_die_inside_a_window(run, book):
    async with Outside(book) as client:
        calls = await killed_inside_a_window(run, client)
        await asyncio.to_thread(run.hub_of_epoch, 2)
        assert whole(await calls)
        await asyncio.to_thread(run.reach, run.step() + 2)
        status = await settled(client)
        assert {row.weight_version for row in status.engines} == {status.published}


async def killed_inside_a_window(run, client):
    """SIGKILL to controller and hub in a window that is open, by the controller's own log, while it was stopped for a
    look; returns the requests that were in flight."""
    pid = await asyncio.to_thread(run.pid, "controller-00000-00000")
    hub = await asyncio.to_thread(run.hub_pid)
    logs = (run.run_dir / "logs" / "attempt-0").rglob("controller-00000-00000.g*.log")
    log = max(logs, key=lambda path: path.stat().st_mtime)
    calls = client.begin()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if calls.done():
            assert whole(await calls)
            calls = client.begin()
        if not (await client.controller.status()).window:
            await asyncio.sleep(0.005)
            continue
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # for what it wrote to reach its log
        last = [line for line in log.read_text().splitlines() if " window " in line][-1]
        if "begins with" in last and not calls.done():
            os.kill(pid, signal.SIGKILL)
            os.kill(hub, signal.SIGKILL)
            return calls
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("no window was met open")


async def settled(client):
    """The controller's status between two windows, with all engines in service."""
    deadline = time.monotonic() + 60
    while True:
        try:
            status = await client.controller.status()
            if not status.window and [row.state for row in status.engines] == ["serving"] * ENGINES:
                return status
        except RpcError:
            pass  # it is not back yet
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def stopped_and_started(run, book):
    cells = [f"engine-policy-0-{index:05d}" for index in range(ENGINES)]
    async with Outside(book) as client:
        for _ in range(ROUNDS):
            calls = client.begin()
            await client.in_flight(calls, ENGINES, each=1)
            await asyncio.to_thread(stop_all, run, cells)
            await asyncio.to_thread(start_all, run, cells)
            assert whole(await calls)


def stop_all(run, cells):
    with OperatorClient(run.run_dir) as operator:
        rows = {row.cell: row for row in operator.cells() if row.cell in cells}
        for cell, row in rows.items():
            operator.stop_cell(cell, row.generation, "round")
        wait_for(
            lambda: all(row.state == "stopped" for row in operator.cells() if row.cell in rows), "all engines to stop"
        )
        hosts = {node.node: node.address for node in operator.status().nodes}
    assert footprint(run)["processes"]["engine-policy-0"] == 0
    for row in rows.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((hosts[row.node], row.workers[0].ports["http"]))


def start_all(run, cells):
    with OperatorClient(run.run_dir) as operator:
        for cell in cells:
            operator.start_cell(cell)
    run.pids("engine-policy-0")


def footprint(run):
    """What a run holds: processes by pool, listening sockets, each cell's ports and places, and what the hub has noted.

    A port may be another one than before: a new hub does not know which one a cell had that died with the old hub.
    """
    processes, listening = Counter(), 0
    listeners = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    for process in procfs.marked(procfs.snapshot(), f"{run.run_id}/0/", str(run.run_dir)):
        worker = procfs.mark_of(process.pid)[0].split("/")[4]
        processes[worker.rpartition("-")[0].rpartition("-")[0] or worker] += 1
        try:
            links = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        listening += sum(link.removeprefix("socket:[").rstrip("]") in listeners for link in links)
    with OperatorClient(run.run_dir) as operator:
        known = operator.dump()
    return {
        "processes": processes,
        "listening": listening,
        "ports": {cell["cell"]: [sorted(worker["ports"]) for worker in cell["workers"]] for cell in known["cells"]},
        "places": {cell["cell"]: [worker["node"] for worker in cell["workers"]] for cell in known["cells"]},
        "held": [(node["node"], node["gpu_holders"], node["strays"]) for node in known["nodes"]],
        "waiting": (known["waiting"], known["reserved"]),
    }


async def listed_by_the_router(book):
    async with Outside(book) as client, client.http.get(f"{book.router}/workers") as answer:
        return sorted(worker["url"] for worker in (await answer.json())["workers"])
