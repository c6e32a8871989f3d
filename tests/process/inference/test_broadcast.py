"""Weights broadcast into embedded engines through the controller; whoever dies in it costs one window and no hang."""

import asyncio
import signal
import time

import pytest

from miles_hpc.config.schema import Config, InferenceConfig, MakeModelConfig
from miles_hpc.inference.book import engine_urls_in, router_url_in
from miles_hpc.inference.broadcast import update_from_sender
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import WeightsNotTaken, update_from_disk
from miles_hpc.train.make_model import make_model
from miles_hpc.wire.address import HostAndPort

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

START_S = 240.0
"""Until both engines have loaded torch on a busy machine."""
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def sender_of(path, **options):
    from safetensors.torch import load_file

    from miles_hpc.train.sender import TensorSender

    return TensorSender(load_file(f"{path}/model.safetensors"), **options)


def scenario(fleet, body):
    async def main():
        async with open_http() as http, ControllerClient(fleet) as controller:
            generate = GenerateClient(
                lambda: router_url_in(fleet.pools),
                http,
                384,
                published_only=True,
                engines=lambda: engine_urls_in(fleet.pools),
            )
            return await asyncio.wait_for(body(http, controller, generate), 500)

    return asyncio.run(main())


def embedded_fleet(make_fleet, **settings):
    config = Config(inference=InferenceConfig(engine="embedded", engines=2, stall_s=18.0, **settings))
    fleet = make_fleet(config=config)
    fleet.controller()
    fleet.router()
    fleet.engines = [fleet.real_engine(index, wait=False) for index in range(2)]
    return fleet


async def tokens(generate, count=6):
    drawn = await asyncio.gather(*(generate.generate([10, 20, 30 + i], GREEDY, deadline_s=60) for i in range(count)))
    return [one.token_ids for one in drawn], {version for one in drawn for version, _, _ in one.weight_versions}


def test_a_broadcast_gives_what_a_load_from_disk_gives_and_engines_come_and_go_between(make_fleet, free_port):
    fleet = embedded_fleet(make_fleet)
    paths = [make_model(MakeModelConfig(), seed, fleet.run_dir / "weights" / str(seed)) for seed in (1, 2)]

    async def broadcast(http, controller, version, path):
        window = await controller.start_update_weights(START_S)
        sender = sender_of(path, bucket_bytes=100_000)
        assert len(sender.buckets) > 1
        address = HostAndPort("127.0.0.1", free_port())
        result = await update_from_sender(window.engines, sender, version, address, http=http)
        return await controller.end_update_weights(window.window_id, version, "", result.failed)

    async def body(http, controller, generate):
        window = await controller.start_update_weights(START_S)
        result = await update_from_disk(window.engines, str(paths[0]), 1, http=http)
        await controller.end_update_weights(window.window_id, 1, str(paths[0]), result.failed)
        await controller.wait_serving(2, 30)
        old, versions = await tokens(generate)
        assert versions == {1}
        assert await broadcast(http, controller, 2, paths[1]) == {}
        await controller.wait_serving(2, 30)
        sent, versions = await tokens(generate)
        assert versions == {2} and sent != old
        # A healed engine has no directory to load from; it waits, and the next window includes it.
        victim = fleet.engines[0]
        fleet.kill(victim)
        await asyncio.to_thread(fleet.real_engine, 0, ports=victim.ports, n=2)
        assert await broadcast(http, controller, 3, paths[1]) == {}
        await controller.wait_serving(2, 30)
        again, versions = await tokens(generate)
        assert versions == {3} and again == sent
        window = await controller.start_update_weights(30)
        result = await update_from_disk(window.engines, str(paths[1]), 4, http=http)
        await controller.end_update_weights(window.window_id, 4, str(paths[1]), result.failed)
        loaded, _ = await tokens(generate)
        assert loaded == sent

    scenario(fleet, body)


def test_an_engine_that_dies_in_a_broadcast_ends_the_window_and_the_next_one_has_its_replacement(make_fleet, free_port):
    fleet = embedded_fleet(make_fleet)
    paths = [make_model(MakeModelConfig(), seed, fleet.run_dir / "weights" / str(seed)) for seed in (1, 2)]

    async def body(http, controller, generate):
        window = await controller.start_update_weights(START_S)
        result = await update_from_disk(window.engines, str(paths[0]), 1, http=http)
        await controller.end_update_weights(window.window_id, 1, str(paths[0]), result.failed)
        await controller.wait_serving(2, 30)
        old, _ = await tokens(generate)
        calls = asyncio.ensure_future(tokens(generate))
        window = await controller.start_update_weights(30)
        victim, other = fleet.engines
        sender, sent = sender_of(paths[1], bucket_bytes=20_000), 0
        send = sender.send

        def send_and_strike(bucket):
            nonlocal sent
            sent += 1
            if bucket == 2:
                victim.process.send_signal(signal.SIGKILL)
            send(bucket)

        sender.send = send_and_strike
        began = time.monotonic()
        with pytest.raises(WeightsNotTaken, match="broke"):
            address = HostAndPort("127.0.0.1", free_port())
            await update_from_sender(window.engines, sender, 2, address, http=http, timeout_s=15.0)
        assert time.monotonic() - began < 40 and sent >= 3
        fleet.hub.drop(victim.cell)
        await controller.abort_update_weights(window.window_id, "an engine died")

        # The other one may hang in the broken group: then it is replaced too, as the hub would do.
        def heal(engine, index):
            if engine.process.poll() is None:
                engine.process.kill()
            engine.process.wait(10)
            fleet.hub.drop(engine.cell)
            fleet.real_engine(index, ports=engine.ports, n=2)

        await asyncio.to_thread(heal, victim, 0)
        deadline = time.monotonic() + 60
        while {row.cell: row.state for row in (await controller.status()).engines}.get(other.cell) != "serving":
            if any(asked.cell == other.cell for asked in fleet.hub.replaced):
                await asyncio.to_thread(heal, other, 1)
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        await controller.wait_serving(2, 60)
        assert (await calls)[0] == old
        window = await controller.start_update_weights(30)
        assert len(window.engines) == 2
        address = HostAndPort("127.0.0.1", free_port())
        result = await update_from_sender(window.engines, sender_of(paths[1]), 3, address, http=http)
        assert (result.failed, len(result.updated)) == ({}, 2)
        await controller.end_update_weights(window.window_id, 3, "", {})
        new, versions = await tokens(generate)
        assert versions == {3} and new != old

    scenario(fleet, body)
