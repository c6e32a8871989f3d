"""How many tiny groups a second go through one executor? Real executor, real workers, functions that answer at once."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.executor import Executor
from miles_hpc.rollout.published import PublishedVersions
from miles_hpc.transport.carriers import Outbox
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.security import create_secrets

HERE = Path(__file__).parent
ANY = HostAndPort("127.0.0.1", 0)


def prepare(run_dir, prompts, settings):
    data = run_dir / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p{index}", "label": "x"}) + "\n" for index in range(prompts)))
    config = msgspec.convert({**settings, "data": {"prompts": str(data), "shuffle": False}}, Config)
    write_resolved(config, run_dir)
    create_secrets(run_dir, 0)
    return config


@contextlib.contextmanager
def workers(run_dir, count, address, *more):
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(run_dir), str(index), address.host, str(address.port), *more],
            env={**os.environ, "PYTHONPATH": str(HERE)},
        )
        for index in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)


async def tiny_groups(run_dir, count, processes, samples=1):
    """Groups a second of one rollout of `count` groups, after a first one that warms everything up."""
    config = prepare(
        run_dir,
        count,
        {
            "rollout": {
                "batch_size": count,
                "samples_per_prompt": samples,
                "concurrency": 64,
                "generate": "tiny:generate",
            },
            "reward": {"function": "tiny:reward"},
        },
    )
    dispatcher = Dispatcher(ANY, run_dir, 0, lease_s=config.timing.dead)
    outbox = Outbox(ANY)
    running = asyncio.ensure_future(dispatcher.run())
    try:
        executor = Executor(config, 0, run_dir, dispatcher, outbox, PublishedVersions(run_dir))
        with workers(run_dir, processes, dispatcher.address) as started:
            watched = [psutil.Process(process.pid) for process in started]
            await executor.open({"incarnation": 1, "state": None}, [])
            rates = []
            for rollout in range(3):
                begun, cpu = time.monotonic(), time.process_time()
                theirs = sum(sum(one.cpu_times()[:2]) for one in watched)
                await executor.generate({"incarnation": 1, "rollout_id": rollout, "weight_version": 1}, [])
                rates.append(count / (time.monotonic() - begun))
                spent = time.process_time() - cpu
                theirs = sum(sum(one.cpu_times()[:2]) for one in watched) - theirs
                await executor.prepare_commit({"incarnation": 1, "rollout_id": rollout}, [])
                await executor.committed({"incarnation": 1, "rollout_id": rollout}, [])
            return {
                "groups_per_s": max(rates[1:]),
                "executor_us": spent / count * 1e6,
                "worker_us": theirs / count * 1e6,
            }
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        dispatcher.close()
        outbox.close()
