"""1,000 generations at once from one rollout worker: how much of a bare client's throughput is left, at which CPU?"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import aiohttp
import psutil
from groups import ANY, prepare, workers

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.executor import Executor
from miles_hpc.rollout.published import PublishedVersions
from miles_hpc.train.make_model import make_model
from miles_hpc.transport.carriers import Outbox

COUNT = 1000
ROUNDS = 5


@contextlib.contextmanager
def fake_engine(model, token_ms):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "miles_hpc.engine.fake", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--model-path", str(model), "--token-ms", str(token_ms)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MILES_HPC_PARENT": str(os.getpid())},
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


async def bare_session(port):
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    break
        await asyncio.sleep(0.1)
    url = f"http://127.0.0.1:{port}/update_weight_version"
    async with http.post(url, json={"new_version": "1", "abort_all_requests": False}) as answer:
        assert answer.status == 200, await answer.text()
    return http


async def bare_round(http, port, count, tokens):
    """Seconds of each request, and of all."""
    times = []

    async def one(seed):
        body = {
            "input_ids": [5, 6, 7, 8],
            "sampling_params": {"max_new_tokens": tokens, "sampling_seed": seed, "temperature": 1.0},
            "return_logprob": True,
        }
        begun = time.monotonic()
        async with http.post(f"http://127.0.0.1:{port}/generate", json=body) as answer:
            await answer.read()
            assert answer.status == 200
        times.append(time.monotonic() - begun)

    begun = time.monotonic()
    await asyncio.gather(*(one(seed) for seed in range(count)))
    return times, time.monotonic() - begun


def p99_ms(times):
    return sorted(times)[int(len(times) * 0.99)] * 1e3


async def measure(run_dir, tokens):
    """Medians of rounds that alternate, the first of each left out."""
    model = make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, run_dir / "model")
    config = prepare(
        run_dir,
        COUNT,
        {
            "rollout": {
                "batch_size": COUNT,
                "samples_per_prompt": 1,
                "concurrency": COUNT,
                "max_response_tokens": tokens,
                "generate": "tiny:timed",
            },
            "reward": {"function": "tiny:reward"},
            "model": {"path": str(model)},
        },
    )
    os.environ["BENCH_TIMES"] = str(run_dir / "times.json")
    with fake_engine(model, token_ms=5) as port:
        http = await bare_session(port)
        dispatcher = Dispatcher(ANY, run_dir, 0, lease_s=config.timing.dead)
        outbox = Outbox(ANY)
        running = asyncio.ensure_future(dispatcher.run())
        try:
            executor = Executor(config, 0, run_dir, dispatcher, outbox, PublishedVersions(run_dir))
            with workers(run_dir, 1, dispatcher.address, str(port)) as started:
                await executor.open({"incarnation": 1, "state": None}, [])
                found = []
                watched = psutil.Process(started[0].pid)
                for rollout in range(1 + ROUNDS):
                    cpu = time.process_time()
                    times, bare_s = await bare_round(http, port, COUNT, tokens)
                    bare_cpu = time.process_time() - cpu
                    cpu, begun = sum(watched.cpu_times()[:2]), time.monotonic()
                    await executor.generate({"incarnation": 1, "rollout_id": rollout, "weight_version": 1}, [])
                    worker_s = time.monotonic() - begun
                    worker_cpu = sum(watched.cpu_times()[:2]) - cpu
                    worker_times = json.loads((run_dir / "times.json").read_text())
                    one = (bare_s, worker_s, bare_cpu, worker_cpu, p99_ms(times), p99_ms(worker_times))
                    found.append(one)
        finally:
            await http.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            dispatcher.close()
            outbox.close()
    bare_s, worker_s, bare_cpu, worker_cpu, bare_p99, worker_p99 = map(statistics.median, zip(*found[1:], strict=True))
    return {
        "bare_per_s": COUNT / bare_s,
        "bare_p99_ms": bare_p99,
        "bare_cpu_us": bare_cpu / COUNT * 1e6,
        "worker_per_s": COUNT / worker_s,
        "worker_p99_ms": worker_p99,
        "worker_cpu_us": worker_cpu / COUNT * 1e6,
        "ratio": statistics.median(bare / worker for bare, worker, *_ in found[1:]),
    }
