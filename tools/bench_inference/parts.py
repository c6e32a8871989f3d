"""Processes of the product that the parts of the benchmark share: fake engines and the real router."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

import msgspec

from miles_hpc.config.schema import Config, MakeModelConfig, ModelConfig
from miles_hpc.specs.base import LaunchCommandContext
from miles_hpc.specs.router import router_specs
from miles_hpc.train.make_model import make_model
from miles_hpc.wire.address import HostAndPort

HOST = "127.0.0.1"
START_S = 60.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def tiny_model(run_dir):
    return make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, run_dir / "model")


@contextlib.contextmanager
def running(commands):
    """The processes of these commands, until the end of the block."""
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
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
    ports = {port.name: HostAndPort(HOST, free_port()) for port in spec.port_infos}
    context = LaunchCommandContext(
        cell_index=0,
        worker_index=0,
        local_gpu_ids=(),
        self_addrs=ports,
        cell_addrs=(ports,),
        pool_addrs={},
        run_dir=str(run_dir),
        attempt=0,
    )
    with running([spec.launch_command(context)]):
        url = ports["http"].addr
        wait_http(f"{url}/liveness")
        yield url


def wait_http(url):
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), _direct.open(url, timeout=5) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline:
            sys.exit(f"{url} did not answer within {START_S:g} s")
        time.sleep(0.05)


async def list_engines(api, urls):
    """Until the router has them all as healthy."""
    for url in urls:
        await api.add(url)
    while {worker.url for worker in await api.workers() if worker.healthy} != set(urls):  # noqa: ASYNC110 - its state
        await asyncio.sleep(0.05)


def load():
    return os.getloadavg()[0]
