"""Controller, owners and engines killed inside weight windows and around them; the router is the real one."""

import asyncio
import importlib.util
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.inference.book import engine_urls_in, router_url_in
from miles_hpc.inference.broadcast import TensorHeader, update_from_sender
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.engine_api import EngineApi
from miles_hpc.inference.generate import GenerateClient, GenerateUnavailable, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import WeightsNotTaken, update_from_disk
from miles_hpc.inference.windows import ControllerError, WindowTimeout
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.rpc import RpcError

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

_PATH = Path(__file__).parents[2] / "process" / "inference" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("chaos_inference_fleet", _PATH)
_FLEET = importlib.util.module_from_spec(_SPEC)
sys.modules["chaos_inference_fleet"] = _FLEET
_SPEC.loader.exec_module(_FLEET)
make_fleet = _FLEET.make_fleet
until = _FLEET.until

SAMPLING = SamplingParams(max_new_tokens=8, seed=5)
VOCABULARY = 384


def scenario(fleet, body):
    async def main():
        async with open_http() as http, ControllerClient(fleet) as controller:
            generate = GenerateClient(
                lambda: router_url_in(fleet.pools),
                http,
                VOCABULARY,
                published_only=True,
                engines=lambda: engine_urls_in(fleet.pools),
            )
            return await asyncio.wait_for(body(http, controller, generate), 240)

    return asyncio.run(main())


def started(make_fleet, token_ms=1.0, **settings):
    fleet = make_fleet(engines=2, **settings)
    fleet.control = fleet.controller()
    fleet.route = fleet.router()
    fleet.engines = [fleet.engine(index, token_ms=token_ms) for index in range(2)]
    return fleet


async def publish(fleet, controller, version, http):
    window = await controller.start_update_weights(60)
    path = fleet.weights(version)
    result = await update_from_disk(window.engines, path, version, http=http)
    await controller.end_update_weights(window.window_id, version, path, result.failed)
    await controller.wait_serving(2, 60)


async def draw(generate, count=16, deadline_s=90):
    calls = [generate.generate([10, 20, 30 + i], SAMPLING, deadline_s=deadline_s) for i in range(count)]
    return await asyncio.gather(*calls)


def versions(drawn):
    return {version for one in drawn for version, _, _ in one.weight_versions}


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_the_router_may_come_before_between_or_after_the_engines(make_fleet, moment):
    fleet = make_fleet(engines=2)
    fleet.controller()
    order = {"before": "rab", "between": "arb", "after": "abr"}[moment]
    start = {"r": fleet.router, "a": lambda: fleet.engine(0), "b": lambda: fleet.engine(1)}
    for part in order:
        start[part]()

    async def body(http, controller, generate):
        await publish(fleet, controller, 1, http)
        assert versions(await draw(generate)) == {1}

    scenario(fleet, body)


MOMENTS = ("nothing-done", "one-paused", "one-updated", "broadcast-half-way", "broadcast-done")


class ScriptedSender:
    """Of tensors that fake engines only take note of; strikes in the middle, and breaks there when it is told to."""

    backend = "gloo"

    def __init__(self, strike, breaks):
        self.strike, self.breaks, self.sent = strike, breaks, 0
        self.buckets = [[TensorHeader(name=f"w{i}", dtype="float32", shape=[2, 2])] for i in range(3)]

    def join(self, address, *, world_size, name, timeout_s):
        assert world_size == 3

    def send(self, bucket):
        self.sent += 1
        if bucket == 1:
            self.strike()
            if self.breaks:
                raise OSError("the trainer's side broke")

    def leave(self):
        pass


def test_a_controller_killed_inside_a_window_comes_back_and_no_engine_stays_paused_or_ahead(make_fleet):
    fleet = started(make_fleet, token_ms=200)

    async def strike(http, window, moment, version, calls):
        def kill():
            assert not calls.done(), f"{moment}: no request was in flight"
            fleet.kill(fleet.control)

        one = EngineApi(window.engines[0].url, http)
        if moment in ("one-paused", "one-updated"):
            await one.pause("retract")
        if moment == "one-updated":
            await one.update_weights_from_disk(fleet.weights(version), version)
        if not moment.startswith("broadcast"):
            kill()
            return
        sender = ScriptedSender(kill, moment == "broadcast-half-way")
        address = HostAndPort("127.0.0.1", _FLEET.free_port())
        try:
            await update_from_sender(window.engines, sender, version, address, http=http)
        except WeightsNotTaken:
            assert sender.breaks
        assert sender.sent == (2 if sender.breaks else 3)

    async def body(http, controller, generate):
        for number, moment in enumerate(MOMENTS):
            old, new = 2 * number + 1, 2 * number + 2
            await publish(fleet, controller, old, http)
            calls = asyncio.ensure_future(draw(generate))
            for engine in fleet.engines:
                while not await asyncio.to_thread(fleet.running, engine):  # noqa: ASYNC110 - its state
                    await asyncio.sleep(0.01)
            window = await controller.start_update_weights(60)
            await strike(http, window, moment, new, calls)
            fleet.control = await asyncio.to_thread(fleet.controller, number + 2)
            with pytest.raises((ControllerError, RpcError)):
                await controller.end_update_weights(window.window_id, new, fleet.weights(new), {})
            status = await controller.wait_serving(2, 60)
            assert {row.weight_version for row in status.engines} == {old} == {status.published}, moment
            assert len(await calls) == 16
            assert versions(await draw(generate)) == {old}, moment

    scenario(fleet, body)
    assert fleet.hub.replaced == []


def test_a_window_whose_owner_is_killed_is_aborted_and_the_old_weights_serve(make_fleet):
    fleet = started(make_fleet, token_ms=200)
    owner = fleet._start("driver-00000", 1, {}, [sys.executable, "-c", OWNER], {})
    fleet.put(owner)

    async def body(http, controller, generate):
        # The owner published 1, and holds a window for 2 with all engines paused and updated.
        await asyncio.to_thread(_FLEET.wait_until, lambda: "holds" in owner.log.read_text(), "the owner's window", 60)
        with pytest.raises(WindowTimeout, match="is open"):
            await controller.start_update_weights(1)
        calls = asyncio.ensure_future(draw(generate))
        await asyncio.sleep(0.1)
        fleet.kill(owner)
        assert not calls.done()
        began = time.monotonic()
        status = await controller.wait_serving(2, 60)
        while status.window or {row.weight_version for row in status.engines} != {1}:
            await asyncio.sleep(0.1)
            status = await controller.status()
            assert time.monotonic() - began < 30
        await controller.wait_serving(2, 60)
        assert len(await calls) == 16
        assert versions(await draw(generate, 4)) == {1}
        await publish(fleet, controller, 3, http)

    scenario(fleet, body)


OWNER = """
import asyncio
from pathlib import Path
from miles_hpc.inference.broadcast import TensorHeader, update_from_sender
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import WeightsNotTaken, update_from_disk
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.worker_env import WorkerEnv

async def main():
    env = WorkerEnv.from_environ()
    with HubClient(env) as hub:
        async with open_http() as http, ControllerClient(hub) as controller:
            for version in (1, 2):
                path = env.run_dir / "weights" / str(version)
                path.mkdir(parents=True, exist_ok=True)
                (path / "config.json").write_text("{}")
                window = await controller.start_update_weights(60)
                result = await update_from_disk(window.engines, str(path), version, http=http)
                if version == 1:
                    await controller.end_update_weights(window.window_id, 1, str(path), result.failed)
            print("holds", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


def test_of_two_updates_asked_for_at_once_the_second_waits_for_the_first(make_fleet):
    fleet = started(make_fleet, token_ms=200)

    async def body(http, controller, generate):
        await publish(fleet, controller, 1, http)
        calls = asyncio.ensure_future(draw(generate))
        first, second = (asyncio.ensure_future(controller.start_update_weights(60)) for _ in range(2))
        for version, window, other in ((2, first, second), (3, second, None)):
            opened = await window
            result = await update_from_disk(opened.engines, fleet.weights(version), version, http=http)
            if other is not None:
                assert not calls.done()
                done, _ = await asyncio.wait({other}, timeout=0.3)
                assert not done, "both windows were open"
            ended = await controller.end_update_weights(opened.window_id, version, fleet.weights(version), {})
            assert (result.failed, ended) == ({}, {})
        assert len(await calls) == 16
        assert versions(await draw(generate, 4)) == {3}

    scenario(fleet, body)


def test_when_all_engines_are_dead_requests_wait_then_say_why_and_service_returns_by_itself(make_fleet):
    fleet = started(make_fleet)

    async def body(http, controller, generate):
        await publish(fleet, controller, 1, http)
        for engine in fleet.engines:
            fleet.kill(engine)
        with pytest.raises(GenerateUnavailable, match=r"engine|worker|attempts"):
            await generate.generate([10, 20], SAMPLING, deadline_s=4)
        waiting = asyncio.ensure_future(draw(generate))
        for index, engine in enumerate(fleet.engines):
            await asyncio.to_thread(fleet.engine, index, ports=engine.ports, n=2)
        assert versions(await waiting) == {1}

    scenario(fleet, body)
