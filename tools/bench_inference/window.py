"""What does a weight window cost beyond the engines' own loads?

The controller, the engines and the caller are processes of their own; a window is what a driver does: begin, pause,
load, look at each label, continue, end. The engines' own time is that of the load calls alone, all at once.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path

import parts
import psutil

from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.engine_api import EngineApi
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.wire import security
from miles_hpc.wire.address import HostAndPort

ENGINES = 8
SIDE = Path(__file__).with_name("controller_side.py")


async def measure(run_dir, windows=20):
    model = parts.tiny_model(run_dir)
    security.create_secrets(run_dir, 0)
    port = parts.free_port()
    with parts.fake_engines(model, ENGINES, 1.0) as urls:
        command = [sys.executable, str(SIDE), str(run_dir), str(port), *urls]
        with parts.running([command]):
            async with open_http() as http:
                client = ControllerClient.at(lambda: HostAndPort(parts.HOST, port), run_dir, 0)
                try:
                    return await timed(client, http, urls, str(model), windows)
                finally:
                    await client.close()


def cpu_s(processes):
    return sum(sum(one.cpu_times()[:2]) for one in processes)


async def timed(client, http, urls, path, windows):
    totals, loads, cpu, steps = [], [], [], {"begin": [], "update": [], "end": []}
    everyone = [psutil.Process(), *psutil.Process().children()]
    for version in range(1, windows + 2):
        used, begun = cpu_s(everyone), time.monotonic()
        window = await client.start_update_weights(60.0)
        opened = time.monotonic()
        result = await update_from_disk(window.engines, path, version, http=http)
        updated = time.monotonic()
        failed = await client.end_update_weights(window.window_id, version, path, result.failed)
        ended = time.monotonic()
        assert (result.failed, failed, len(window.engines)) == ({}, {}, ENGINES)
        if version > 1:  # the first one waits for the engines
            totals.append(ended - begun)
            cpu.append(cpu_s(everyone) - used)
            for name, seconds in (("begin", opened - begun), ("update", updated - opened), ("end", ended - updated)):
                steps[name].append(seconds)
            begun = time.monotonic()
            apis = [EngineApi(url, http) for url in urls]
            await asyncio.gather(*(api.update_weights_from_disk(path, version) for api in apis))
            loads.append(time.monotonic() - begun)
    median = statistics.median
    return {
        "window_ms": median(totals) * 1e3,
        "window_load_ms": median(loads) * 1e3,
        "window_overhead_ms": median(total - load for total, load in zip(totals, loads, strict=True)) * 1e3,
        # Too short for the kernel's clock ticks, one by one.
        "window_cpu_ms": statistics.fmean(cpu) * 1e3,
        "window_overhead_worst_ms": max(total - load for total, load in zip(totals, loads, strict=True)) * 1e3,
        **{f"window_{name}_ms": median(seconds) * 1e3 for name, seconds in steps.items()},
    }
