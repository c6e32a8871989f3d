"""Our RPC between two processes: CURVE, roles and call ids on. Prints one JSON object; with arguments: the server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import percentile, raw_ping_pong

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.rpc import RpcClient, RpcServer, RpcThreadServer, SyncRpcClient
from miles_hpc.wire.security import create_secrets

CALLS, PIPELINED, WINDOW = 4000, 20000, 64
PARAMS = {"a": "b"}


def serve_plain(run_dir: Path) -> None:
    """A server whose handlers are plain functions, as a trainer rank is."""
    server = RpcThreadServer(HostAndPort("127.0.0.1", 0), {"echo": lambda params, frames: params}, run_dir, 0)
    print(server.address.netloc, flush=True)
    server.serve_forever()


async def serve_async(run_dir: Path) -> None:
    """A server in an event loop, as the executor and the controller are."""

    async def echo(params: Any, frames: list[memoryview]) -> Any:
        return params

    server = RpcServer(HostAndPort("127.0.0.1", 0), {"echo": echo}, run_dir, 0)
    print(server.address.netloc, flush=True)
    await server.serve()


async def pipelined(address: HostAndPort, run_dir: Path) -> float:
    """Calls a second with `WINDOW` open at any time."""
    client = RpcClient(address, run_dir, 0)
    left = iter(range(PIPELINED))

    async def caller() -> None:
        for _ in left:
            await client.call("echo", PARAMS, timeout_s=30)

    await client.call("echo", PARAMS, timeout_s=30)
    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(WINDOW)))
    took = time.perf_counter() - started
    await client.close()
    return PIPELINED / took


def sync_times(address: HostAndPort, run_dir: Path) -> list[float]:
    with SyncRpcClient(address, run_dir, 0) as client:
        times = []
        for _ in range(CALLS):
            started = time.perf_counter()
            client.call("echo", PARAMS, timeout_s=30)
            times.append(time.perf_counter() - started)
    return times[CALLS // 10 :]


def with_server(kind: str, run_dir: Path) -> tuple[list[float], float]:
    server = subprocess.Popen([sys.executable, __file__, kind, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = HostAndPort.parse(server.stdout.readline().strip())
        return sync_times(address, run_dir), asyncio.run(pipelined(address, run_dir))
    finally:
        server.kill()
        server.wait()


def main() -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="bench-control-"))
    create_secrets(run_dir, 0)
    raw = raw_ping_pong(5000)
    plain, plain_per_s = with_server("plain", run_dir)
    loop, loop_per_s = with_server("async", run_dir)
    print(
        json.dumps(
            {
                "raw_p50_us": round(percentile(raw, 50) * 1e6, 1),
                "rpc_p50_us": round(percentile(plain, 50) * 1e6, 1),
                "rpc_p99_us": round(percentile(plain, 99) * 1e6, 1),
                "rpc_async_p50_us": round(percentile(loop, 50) * 1e6, 1),
                "rpc_per_s": round(max(plain_per_s, loop_per_s)),
                "rpc_async_per_s": round(loop_per_s),
            }
        )
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        place = Path(sys.argv[2])
        if sys.argv[1] == "plain":
            serve_plain(place)
        else:
            asyncio.run(serve_async(place))
    else:
        main()
