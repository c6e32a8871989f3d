"""Processes of the product that the parts of the benchmark share: fake engines and the real router."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import psutil

from miles_hpc.config.load import load
from miles_hpc.config.schema import Config, MakeModelConfig, ModelConfig
from miles_hpc.specs.base import LaunchCommandContext
from miles_hpc.specs.engine import engine_specs
from miles_hpc.specs.router import router_specs
from miles_hpc.train.make_model import make_model
from miles_hpc.wire.address import HostAndPort

HOST = "127.0.0.1"
START_S = 180.0
SGLANG_START_S = 420.0
ROOT = Path(__file__).parents[2]
SGLANG_FILE = ROOT / "tests" / "sglang" / "cpu.toml"
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def tiny_model(run_dir):
    return make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, run_dir / "model")


@contextlib.contextmanager
def running(commands, env=None):
    """The processes of these commands, until the end of the block."""
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    processes = [subprocess.Popen(command, **silent) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(20)


@contextlib.contextmanager
def fake_engines(model, count, token_ms):
    """Urls of that many."""
    ports = [free_port() for _ in range(count)]
    command = [sys.executable, "-m", "miles_hpc.engine.fake", "--host", HOST, "--model-path", str(model)]
    with running([[*command, "--token-ms", str(token_ms), "--port", str(port)] for port in ports]):
        urls = [f"http://{HOST}:{port}" for port in ports]
        for url in urls:
            wait_http(f"{url}/health")
        yield urls


@contextlib.contextmanager
def router(run_dir, model):
    """Url of a router with the command line of the product."""
    spec = router_specs(msgspec.structs.replace(Config(), model=ModelConfig(path=str(model))))[0]
    context = launch_context(spec, run_dir)
    with running([spec.launch_command(context)]):
        url = context.self_addrs["http"].addr
        wait_http(f"{url}/liveness")
        yield url


@contextlib.contextmanager
def sglang_engine(run_dir):
    """Process and url of the real SGLang of tools/sglang-cpu, with the command line of the product."""
    if not (ROOT / ".runtimes" / "sglang" / ".installed").exists():
        sys.exit("no real SGLang: run tools/sglang-cpu")
    model = make_model(MakeModelConfig(), 0, run_dir / "sglang-model")
    config = load([SGLANG_FILE], ["data.prompts=/none.jsonl", f"model.path={model}", "inference.keyed=false"])
    spec = engine_specs(config)[0]
    context = launch_context(spec, run_dir)
    with running([spec.launch_command(context)], {**os.environ, **spec.env(context)}) as (engine,):
        url = context.self_addrs["http"].addr
        wait_http(f"{url}/health", SGLANG_START_S)
        process = psutil.Process(engine.pid)
        children = process.children(recursive=True)
        try:
            yield process, url
        finally:
            # They would outlive it by seconds.
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def launch_context(spec, run_dir):
    """What the only worker of a pool is started with, on free ports."""
    ports = {port.name: HostAndPort(HOST, free_port()) for port in spec.port_infos}
    return LaunchCommandContext(
        cell_index=0,
        worker_index=0,
        local_gpu_ids=(),
        self_addrs=ports,
        cell_addrs=(ports,),
        pool_addrs={},
        run_dir=str(run_dir),
        attempt=0,
    )


def wait_http(url, start_s=START_S):
    deadline = time.monotonic() + start_s
    while True:
        with contextlib.suppress(OSError), _direct.open(url, timeout=5) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline:
            sys.exit(f"{url} did not answer within {start_s:g} s")
        time.sleep(0.05)


async def list_engines(api, urls):
    """Until the router has them all as healthy."""
    for url in urls:
        await api.add(url)
    while {worker.url for worker in await api.workers() if worker.healthy} != set(urls):  # noqa: ASYNC110 - its state
        await asyncio.sleep(0.05)
