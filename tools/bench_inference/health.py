"""What does looking after an idle engine cost it? As a share of one core.

An engine on a CPU, embedded or the real SGLang, is left alone and looked at as in a run, in turns: by its agent
(`/health` every `probe_interval`), the router (`/health` every second) and the controller (`/v1/loads`, for its
scheduler's sign of life). An idle SGLang uses its core by itself; the difference of what the engine's processes use is
the traffic's cost. The median of the rounds counts: an idle engine does not use the same in each of them.
"""

import asyncio
import contextlib
import statistics
import sys
import time

import parts
import psutil

from miles_hpc.config.schema import Config
from miles_hpc.inference import health
from miles_hpc.inference.engine_api import EngineApi
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.router_api import RouterApi

SECONDS, ROUNDS = 10.0, 5
SETTLE_S = 2.0


def used(process):
    """CPU seconds of a process and its living children."""
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


async def share(process, seconds):
    before, begun = used(process), time.monotonic()
    await asyncio.sleep(seconds)
    return (used(process) - before) / (time.monotonic() - begun)


async def probe(url, every_s):
    """As an agent does: a connection for each look."""
    while True:
        async with open_http() as http:
            await EngineApi(url, http).health()
        await asyncio.sleep(every_s)


async def watch(url, stall_s):
    """As the controller does."""
    async with open_http() as http:
        api, stamp = EngineApi(url, http), None
        while True:
            await asyncio.sleep(health.interval_s(stall_s))
            stamp = (await health.look(api, stamp, health.patience_s(stall_s))).stamp


@contextlib.asynccontextmanager
async def looked_at(router, url):
    """As by the processes of a run, for the length of the block."""
    config = Config()
    looking = [
        asyncio.ensure_future(probe(url, config.timing.probe_interval)),
        asyncio.ensure_future(watch(url, config.inference.stall_s)),
    ]
    await parts.list_engines(router, [url])
    try:
        yield
    finally:
        await router.remove(url)
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)


async def shares(process, run_dir, model, url):
    """For each round what the engine uses alone, and when it is looked at."""
    async with open_http() as http:
        with parts.router(run_dir, model) as router_url:
            router, rounds = RouterApi(router_url, http), []
            for _ in range(ROUNDS):
                alone = await share(process, SECONDS)
                async with looked_at(router, url):
                    await asyncio.sleep(SETTLE_S)
                    rounds.append((alone, await share(process, SECONDS)))
                await asyncio.sleep(SETTLE_S)
    return rounds


def figures(rounds, prefix=""):
    costs = [watched - alone for alone, watched in rounds]
    return {
        f"{prefix}engine_idle_share": statistics.median(alone for alone, _ in rounds),
        f"{prefix}engine_watched_share": statistics.median(watched for _, watched in rounds),
        f"{prefix}health_share": max(0.0, statistics.median(costs)),
        f"{prefix}health_worst_share": max(0.0, *costs),
    }


async def measure(run_dir, *, sglang=False):
    model = parts.tiny_model(run_dir)
    port = parts.free_port()
    url = f"http://{parts.HOST}:{port}"
    command = [sys.executable, "-m", "miles_hpc.engine.serve", "--host", parts.HOST, "--port", str(port)]
    with parts.running([[*command, "--model-path", str(model)]]) as (engine,):
        parts.wait_http(f"{url}/health")
        found = figures(await shares(psutil.Process(engine.pid), run_dir, model, url))
    if sglang:
        with parts.sglang_engine(run_dir) as (process, url):
            found |= figures(await shares(process, run_dir, model, url), "sglang_")
    return found
