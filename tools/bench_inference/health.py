"""What does looking after an idle engine cost it? As a share of one core.

An embedded engine on a CPU is left alone, then looked at as in a run: by its agent (`/health` every `probe_interval`),
the router (`/health` every second) and the controller (`/v1/loads`, for its scheduler's sign of life). The difference
of what the engine's processes use is the traffic's cost.
"""

import asyncio
import contextlib
import sys
import time

import parts
import psutil

from miles_hpc.config.schema import Config
from miles_hpc.inference import health
from miles_hpc.inference.engine_api import EngineApi
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.router_api import RouterApi

SECONDS = 20.0


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


async def measure(run_dir):
    config = Config()
    model = parts.tiny_model(run_dir)
    port = parts.free_port()
    url = f"http://{parts.HOST}:{port}"
    command = [sys.executable, "-m", "miles_hpc.engine.serve", "--host", parts.HOST, "--port", str(port)]
    with contextlib.ExitStack() as stack:
        (engine,) = stack.enter_context(parts.running([[*command, "--model-path", str(model)]]))
        parts.wait_http(f"{url}/health")
        process = psutil.Process(engine.pid)
        alone = await share(process, SECONDS)
        router = stack.enter_context(parts.router(run_dir, model))
        async with open_http() as http:
            await parts.list_engines(RouterApi(router, http), [url])
        looking = [
            asyncio.ensure_future(probe(url, config.timing.probe_interval)),
            asyncio.ensure_future(watch(url, config.inference.stall_s)),
        ]
        watched = await share(process, SECONDS)
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
    return {"engine_idle_share": alone, "engine_watched_share": watched, "health_share": max(0.0, watched - alone)}
