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
from samples import reset_peak, status_mb

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
    """Groups a second of rollouts of `count` groups, after a first one that warms everything up."""
    rollout = {"batch_size": count, "samples_per_prompt": samples, "concurrency": 64, "generate": "tiny:generate"}
    rounds = await through_executor(run_dir, rollout, processes, rounds=3)
    best = min(rounds[1:], key=lambda one: one["seconds"])
    return {
        "groups_per_s": count / best["seconds"],
        "executor_us": best["executor_s"] / count * 1e6,
        "worker_us": best["worker_s"] / count * 1e6,
    }


async def long_groups(run_dir, tokens, processes, count=32, samples=4):
    """Groups of long samples: time, CPU, and how much the executor grew over what it holds."""
    rollout = {
        "batch_size": count,
        "samples_per_prompt": samples,
        "concurrency": 4,
        "generate": "tiny:long",
        "max_response_tokens": tokens,
    }
    rounds = await through_executor(run_dir, rollout, processes, rounds=4)
    held = count * samples * 13 * tokens
    best = min(rounds[1:], key=lambda one: one["seconds"])
    return {
        "ms": best["seconds"] * 1e3,
        "executor_ms": best["executor_s"] * 1e3,
        "worker_ms": best["worker_s"] * 1e3,
        "mem_ratio": max(one["grown"] for one in rounds) / held,
    }


async def through_executor(run_dir, rollout, processes, rounds):
    """Seconds, CPU seconds of executor and workers, and growth of this process, for each rollout."""
    settings = {"rollout": rollout, "reward": {"function": "tiny:reward"}}
    config = prepare(run_dir, rollout["batch_size"], settings)
    dispatcher = Dispatcher(ANY, run_dir, 0, lease_s=config.timing.dead)
    outbox = Outbox(ANY)
    running = asyncio.ensure_future(dispatcher.run())
    found = []
    try:
        executor = Executor(config, 0, run_dir, dispatcher, outbox, PublishedVersions(run_dir))
        with workers(run_dir, processes, dispatcher.address) as started:
            watched = [psutil.Process(process.pid) for process in started]
            await executor.open({"incarnation": 1, "state": None}, [])
            for number in range(rounds):
                before = reset_peak()
                begun, cpu = time.monotonic(), time.process_time()
                theirs = sum(sum(one.cpu_times()[:2]) for one in watched)
                await executor.generate({"incarnation": 1, "rollout_id": number, "weight_version": 1}, [])
                seconds, spent = time.monotonic() - begun, time.process_time() - cpu
                theirs = sum(sum(one.cpu_times()[:2]) for one in watched) - theirs
                grown = (status_mb("VmHWM") - before) * 2**20
                found.append({"seconds": seconds, "executor_s": spent, "worker_s": theirs, "grown": grown})
                await executor.prepare_commit({"incarnation": 1, "rollout_id": number}, [])
                await executor.committed({"incarnation": 1, "rollout_id": number}, [])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        dispatcher.close()
        outbox.close()
    return found
