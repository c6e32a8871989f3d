"""One engine of two tensor-parallel ranks: both take part in weight updates, and nothing of it outlives its stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_hpc.agent.farewell import FAREWELL_S, Farewell
from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.inference.broadcast import update_from_sender
from miles_hpc.inference.engine_api import EngineApi, EngineError
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.specs.engine import FAREWELL
from miles_hpc.train.make_model import make_model
from miles_hpc.train.sender import TensorSender
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

FLEET = sys.modules["sglang_fleet"]
PROMPT = [10, 20, 30, 40]
GRACE_S = 5.0
"""Between TERM and KILL, as in a run."""


def test_both_ranks_take_weights_from_disk_and_by_broadcast_and_a_paused_busy_engine_leaves_nothing(make_real_fleet):
    fleet = make_real_fleet(
        "inference.engines=1", "inference.sglang.tp=2", "runtimes.engine.env.SGLANG_CPU_OMP_THREADS_BIND=0|1"
    )
    engine = fleet.real_engine(0, wait=False)
    fleet.wait(engine)
    info = EngineInfo(cell=engine.cell, generation=Generation(1, 1), url=engine.url, ranks=2)
    models = [make_model(MakeModelConfig(), seed, fleet.run_dir / f"model-{seed}") for seed in (1, 2)]

    async def body() -> None:
        async with open_http(fleet.key) as http:
            api = EngineApi(engine.url, http)
            assert await api.missing_calls() == []
            first = await updated(api, info, models[0], 1, http)
            assert len(await api.checksums()) == 2
            second = await updated(api, info, models[1], 2, http)
            assert first != second
            address = HostAndPort("127.0.0.1", FLEET.free_port())
            sender = TensorSender(tensors_of(models[0]), bucket_bytes=200_000)
            result = await update_from_sender([info], sender, 3, address, http=http)
            assert result.failed == {} and await api.weight_version() == 3
            assert await tokens(api) == first
            calls = [asyncio.ensure_future(api.generate(request(800), timeout_s=60)) for _ in range(8)]
            while await asyncio.to_thread(fleet.running, engine) < 8:  # noqa: ASYNC110 - the engine's state
                await asyncio.sleep(0.05)
            await api.pause("retract")
            await asyncio.to_thread(stopped_as_by_an_agent, fleet, engine)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(end, EngineError) or end["meta_info"]["finish_reason"]["type"] for end in ends)

    asyncio.run(asyncio.wait_for(body(), 1000))


async def updated(api: EngineApi, info: EngineInfo, model: Path, version: int, http: Any) -> list[int]:
    result = await update_from_disk([info], str(model), version, http=http)
    assert result.failed == {} and await api.weight_version() == version
    return await tokens(api)


def request(count: int) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}


async def tokens(api: EngineApi) -> list[int]:
    return list((await api.generate(request(16), timeout_s=120))["output_ids"])


def tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(path / "model.safetensors"))


def stopped_as_by_an_agent(fleet: Any, engine: Any) -> None:
    """Farewell, TERM to all, KILL after the grace; nothing may be left then."""
    first = psutil.Process(engine.process.pid)
    tree = [first, *first.children(recursive=True)]
    assert sum("scheduler" in " ".join(process.cmdline()) for process in tree) == 2
    environ = {"MILES_HPC_RUN_DIR": str(fleet.run_dir), "MILES_HPC_ATTEMPT": "0"}
    began = time.monotonic()
    farewell = Farewell(HostAndPort("127.0.0.1", engine.ports["http"]), FAREWELL, environ, began + FAREWELL_S)
    while not farewell.over(time.monotonic()):
        time.sleep(0.01)
    for process in tree:
        if process.is_running():
            os.kill(process.pid, signal.SIGTERM)
    if not _gone(tree, GRACE_S):
        for process in tree:
            if process.is_running():
                process.kill()
    assert _gone(tree, 30), [process for process in tree if process.is_running()]
    engine.process.wait(10)
    print(f"gone {time.monotonic() - began:.1f} s after its farewell began")
    with pytest.raises(OSError):
        FLEET.get_json(f"{engine.url}/v1/loads", fleet.key)


def _gone(tree: list[psutil.Process], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
