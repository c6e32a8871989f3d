"""Executor, workers, session servers, router, controller and fake engines as processes under a real hub link: single
turns and two-turn exchanges, with each stateless part killed while it works, and an equal ledger."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.rollout.client import BatchReader, ExecutorClient

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

_PATH = Path(__file__).parents[1] / "inference" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("process_rollout_fleet", _PATH)
_FLEET = importlib.util.module_from_spec(_SPEC)
sys.modules["process_rollout_fleet"] = _FLEET
_SPEC.loader.exec_module(_FLEET)
make_fleet = _FLEET.make_fleet

STEPS = 5


def start(fleet, kind, index=0, n=1):
    names = ("rpc", "work", "bulk") if kind == "executor" else ()
    ports = {name: _FLEET.free_port() for name in names}
    module = {"executor": "miles_hpc.rollout.run_executor", "rollout-worker": "miles_hpc.rollout.run_worker"}[kind]
    program = fleet._start(f"{kind}-{index:05d}", n, ports, [sys.executable, "-m", module], {})
    fleet.put(program)
    return program


def configure(fleet):
    data = fleet.run_dir / "prompts.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?", "label": str(2 * i)} for i in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **msgspec.to_builtins(fleet.config),
        "data": {"prompts": str(data), "heldout": f"{data}@[:4]"},
        "rollout": {"batch_size": 4, "samples_per_prompt": 2, "session_every": 2, "max_response_tokens": 24},
    }
    settings["model"].pop("make", None)
    fleet.config = msgspec.convert(settings, Config)
    write_resolved(fleet.config, fleet.run_dir)


async def drive(fleet, disturb):
    async with open_http() as http, ControllerClient(fleet) as controller:
        window = await controller.start_update_weights(30)
        path = fleet.weights(1)
        await update_from_disk(window.engines, path, 1, http=http)
        await controller.end_update_weights(window.window_id, 1, path)
        await controller.wait_serving(2, 30)
    client, reader = ExecutorClient(fleet), BatchReader(fleet, 1)
    ledger, seen = [], []
    try:
        await client.open(1, None)
        for step in range(STEPS):
            call = asyncio.ensure_future(client.generate(step, 1))
            if disturb is not None:
                await disturb(step, call)
            await call
            for rank in range(2):
                shard = await asyncio.to_thread(reader.get, step, rank, 2, 30)
                seen.append(len(shard))
                await asyncio.to_thread(reader.ack, step, rank)
            ledger += (await client.prepare_commit(step)).ledger
            await client.committed(step)
        result = await client.evaluate(1)
        assert (result.n, result.failed) == (4, 0)
        counts = await client.counts()
    finally:
        reader.close()
        await client.close()
    assert seen == [4] * 2 * STEPS
    closed = counts["committed"] + counts["returned"] + sum(counts["dropped"].values())
    assert counts["committed"] == 4 * STEPS and closed == counts["dispatched"] and counts["in_flight"] == 0
    return ledger, counts


def fleet_of(make_fleet):
    fleet = make_fleet(engines=2)
    configure(fleet)
    fleet.controller()
    parts = {"router": fleet.router()}
    parts |= {f"engine-{i}": fleet.engine(i, token_ms=10.0) for i in range(2)}
    parts |= {f"session-{i}": fleet.session_server(i) for i in range(2)}
    parts["executor"] = start(fleet, "executor")
    parts |= {f"worker-{i}": start(fleet, "rollout-worker", i) for i in range(2)}
    return fleet, parts


def test_each_stateless_part_may_die_in_the_middle_of_a_step_and_the_ledger_is_the_same(make_fleet):
    calm, parts = fleet_of(make_fleet)
    calm_ledger, counts = asyncio.run(asyncio.wait_for(drive(calm, None), 90))
    assert counts["dropped"] == {}
    memory = {name: psutil.Process(p.process.pid).memory_full_info().uss >> 20 for name, p in parts.items()}
    assert memory["executor"] <= 70 and memory["worker-0"] <= 70, memory
    calm.stop()

    hurt, parts = fleet_of(make_fleet)

    async def in_flight(call):
        while not sum(hurt.running(parts[f"engine-{i}"]) for i in range(2)):
            assert not call.done(), "the step ended before anything was in flight"
            await asyncio.sleep(0.01)

    async def disturb(step, call):
        name = [None, "worker-0", "engine-1", "session-0", "router"][step]
        if name is None:
            return
        await in_flight(call)
        old = parts[name]
        hurt.kill(old)
        if name == "worker-0":
            parts[name] = start(hurt, "rollout-worker", 0, n=2)
        elif name == "engine-1":
            parts[name] = await asyncio.to_thread(hurt.engine, 1, ports=old.ports, n=2, token_ms=10.0)
        elif name == "session-0":
            parts[name] = await asyncio.to_thread(hurt.session_server, 0, ports=old.ports, n=2)
        else:
            parts[name] = await asyncio.to_thread(hurt.router, ports=old.ports, n=2)

    ledger, counts = asyncio.run(asyncio.wait_for(drive(hurt, disturb), 120))
    assert ledger == calm_ledger
    assert set(counts["dropped"]) <= {"lost"} and counts["dropped"]["lost"] >= 1
