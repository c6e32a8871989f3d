"""A small run without hub and agents: the real executor and worker programs, and an address book that is a file."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config
from miles_hpc.rollout.client import BatchReader, ExecutorClient
from miles_hpc.rollout.commits import CommitLog
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation, cell_id, worker_id
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.security import create_secrets
from miles_hpc.wire.worker_env import WorkerEnv

HERE = Path(__file__).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Book:
    """What clients in the test use in place of a HubClient."""

    def __init__(self, env, pools):
        self.env = env
        self.pools = pools


class SmallRun:
    """Starts and kills programs; all are killed by `close`, and must not have failed on their own."""

    def __init__(self, run_dir, prompts=20, config=None, row=lambda index: {}):
        self.run_dir = run_dir
        data = run_dir / "prompts.jsonl"
        data.write_text(
            "".join(json.dumps({"prompt": f"p{i}", "label": "", "metadata": row(i)}) + "\n" for i in range(prompts))
        )
        settings = {
            "data": {"prompts": str(data), "heldout": str(data)},
            "rollout": {"batch_size": 4, "samples_per_prompt": 4, "concurrency": 2, "generate": "scripted:generate"},
            "reward": {"function": "scripted:parity"},
        }
        for section, values in (config or {}).items():
            settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
        self.config = msgspec.convert(settings, Config)
        write_resolved(self.config, run_dir)
        create_secrets(run_dir, 1)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "SCRIPT_DIR": str(run_dir),
            "SCRIPT_DELAY_S": "0",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.listen = {name: HostAndPort("127.0.0.1", free_port()) for name in ("rpc", "work", "bulk")}
        self.cells = {}
        self.processes = {}
        self.killed = set()
        self.write_book()

    def env(self, pool, index=0, n=1, listen=None):
        return WorkerEnv(
            run_dir=self.run_dir,
            attempt=1,
            worker=worker_id(cell_id(pool, index), 0),
            pool=pool,
            cell_index=index,
            worker_index=0,
            generation=Generation(1, n),
            node="node-00000",
            listen=listen or {},
            master={},
            cell_size=1,
        )

    def write_book(self):
        pools = {}
        for cell in sorted(self.cells.values(), key=lambda cell: cell.cell):
            pools.setdefault(cell.cell.rpartition("-")[0], []).append(cell)
        self.pools = pools
        draft = self.run_dir / "book.draft"
        draft.write_bytes(msgspec.json.encode(pools))
        draft.replace(self.run_dir / "book.json")

    def book(self):
        return Book(self.env("driver"), self.pools)

    def start(self, kind, index=0, n=1):
        listen = self.listen if kind == "executor" else {}
        env = self.env({"executor": "executor", "worker": "rollout-worker"}[kind], index, n, listen)
        log = (self.run_dir / f"{env.worker}.g1-{n}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, str(HERE / "programs.py"), kind],
            env={**self.environment, **env.to_environ()},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.processes[process.pid] = process
        self.cells[env.cell] = CellAddrs(
            cell=env.cell, generation=env.generation, node=env.node, ready=True, workers=[dict(listen)]
        )
        self.write_book()
        return process

    def kill(self, process, number=signal.SIGKILL):
        self.killed.add(process.pid)
        process.send_signal(number)
        process.wait(20)

    def withdraw(self, pool, index=0):
        del self.cells[cell_id(pool, index)]
        self.write_book()

    def running(self, pid):
        """Samples that a worker has in flight."""
        return sorted(path.name for path in (self.run_dir / "running").glob(f"{pid}.*"))

    async def until(self, condition, what, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            await asyncio.sleep(0.01)
        return found

    def logs(self):
        return "\n".join(path.read_text() for path in sorted(self.run_dir.glob("*.log")))

    def close(self):
        alive = [process for process in self.processes.values() if process.pid not in self.killed]
        early = [process for process in alive if process.poll() is not None]
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)
        assert not early, f"processes ended by themselves:\n{self.logs()}"


class Driver:
    """Driver and ranks of a run in one coroutine: the order of calls that the real ones make."""

    def __init__(self, run, ranks=2, generation="1-1"):
        self.run = run
        self.ranks = ranks
        self.client = ExecutorClient(run.book())
        self.log = CommitLog(run.run_dir, attempt=1, epoch=1, generation=generation)
        self.opened = self.log.open()

    async def open(self):
        return await self.client.open(self.opened.incarnation, self.opened.data_state)

    async def step(self, rollout_id, version=1):
        result = await self.client.generate(rollout_id, version)
        shards = await asyncio.to_thread(self.pull, rollout_id)
        return result, shards

    def pull(self, rollout_id):
        shards = []
        for rank in range(self.ranks):
            reader = BatchReader(self.run.book(), self.opened.incarnation)
            try:
                shards.append(reader.get(rollout_id, rank, self.ranks, timeout_s=20))
                reader.ack(rollout_id, rank)
            finally:
                reader.close()
        return shards

    async def commit(self, rollout_id, version=1):
        data = await self.client.prepare_commit(rollout_id)
        self.log.append(
            step=rollout_id + 1,
            weight_version=version,
            checkpoint=None,
            data_state=data.data_state,
            counts=data.counts,
            ledger=data.ledger,
        )
        await self.client.committed(rollout_id)
        return data

    async def steps(self, first, last):
        for rollout_id in range(first, last):
            await self.step(rollout_id)
            await self.commit(rollout_id)


def ledger(run_dir):
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture
def small_run(tmp_path):
    made = []

    def make(name="run", **arguments):
        (tmp_path / name).mkdir()
        run = SmallRun(tmp_path / name, **arguments)
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()


@pytest.fixture
def drive():
    return Driver


@pytest.fixture
def read_ledger():
    return ledger
