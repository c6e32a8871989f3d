"""Controller, real router and engines as processes: what is killed is missed by nobody and comes back with weights."""

import asyncio
import time

import pytest

from miles_hpc.inference.book import router_url_in
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import update_from_disk

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SAMPLING = SamplingParams(max_new_tokens=8, seed=5)


async def publish(fleet, controller, version, http):
    window = await controller.start_update_weights(20)
    path = fleet.weights(version)
    result = await update_from_disk(window.engines, path, version, "retract", http=http)
    return result, await controller.end_update_weights(window.window_id, version, path, result.failed)


def scenario(fleet, body):
    """Run `body(http, controller, generate)` with a client of each."""

    async def main():
        async with open_http() as http, ControllerClient(fleet) as controller:
            generate = GenerateClient(lambda: router_url_in(fleet.pools), http, 300, published_only=True)
            return await asyncio.wait_for(body(http, controller, generate), 90)

    return asyncio.run(main())


def prompts(count):
    return [[10, 20, 30 + i] for i in range(count)]


async def draw(generate, count, deadline_s=30):
    calls = [generate.generate(ids, SAMPLING, deadline_s=deadline_s) for ids in prompts(count)]
    return await asyncio.gather(*calls)


async def timed(generate):
    began = time.monotonic()
    await draw(generate, 1)
    return time.monotonic() - began


def test_engines_serve_after_the_first_window_and_each_version_is_seen_in_the_tokens(make_fleet):
    fleet = make_fleet(engines=2)
    fleet.controller()
    router = fleet.router()
    engines = [fleet.engine(0), fleet.engine(1)]

    async def body(http, controller, generate):
        for version in (1, 2):
            result, ended = await publish(fleet, controller, version, http)
            assert (len(result.updated), result.failed, ended) == (2, {}, {})
            status = await controller.wait_serving(2, 20)
            assert (status.published, status.window) == (version, "")
            drawn = await draw(generate, 16)
            assert {span for one in drawn for span in one.weight_versions} == {
                (version, 0, len(one.token_ids)) for one in drawn
            }
        # An answer of a few tokens takes milliseconds; were its head not acknowledged at once, all would take 40 more.
        assert min([await timed(generate) for _ in range(20)]) < 0.035
        return drawn

    drawn = scenario(fleet, body)
    assert fleet.listed_by(router) == {engine.url for engine in engines}
    assert all(len(one.token_ids) == len(one.logprobs) > 0 for one in drawn)


@pytest.mark.parametrize("told", [True, False], ids=["hub-knows", "hub-does-not-know-yet"])
def test_an_engine_killed_with_requests_in_flight_loses_none_and_comes_back_with_the_weights(make_fleet, until, told):
    fleet = make_fleet(engines=2)
    fleet.controller()
    router = fleet.router()
    victim, other = fleet.engine(0, token_ms=150), fleet.engine(1, token_ms=150)

    async def body(http, controller, generate):
        await publish(fleet, controller, 1, http)
        await controller.wait_serving(2, 20)
        undisturbed = await draw(generate, 12)
        calls = asyncio.ensure_future(draw(generate, 12))
        await asyncio.sleep(0.2)
        loads = [await asyncio.to_thread(fleet.running, engine) for engine in (victim, other)]
        assert min(loads) > 0, f"requests in flight by engine: {loads}"
        fleet.kill(victim, told=told)
        disturbed = await calls
        assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
        if not told:
            fleet.hub.drop(victim.cell)
        await asyncio.to_thread(until, lambda: fleet.listed_by(router) == {other.url}, "the router drops the dead one")
        healed = await asyncio.to_thread(fleet.engine, 0, ports=victim.ports, n=2, token_ms=1.0)
        status = await controller.wait_serving(2, 20)
        row = next(row for row in status.engines if row.cell == healed.cell)
        assert (str(row.generation), row.weight_version, row.state) == ("1-2", 1, "serving")
        await draw(generate, 8)
        assert fleet.listed_by(router) == {victim.url, other.url}

    scenario(fleet, body)
    assert fleet.hub.replaced == []


@pytest.mark.parametrize("told", [True, False], ids=["new-generation", "behind-the-hub's-back"])
def test_a_router_killed_and_started_on_its_port_has_all_engines_again_and_no_request_is_lost(make_fleet, told):
    fleet = make_fleet(engines=2)
    fleet.controller()
    router = fleet.router()
    engines = [fleet.engine(i, token_ms=100) for i in range(2)]

    async def body(http, controller, generate):
        await publish(fleet, controller, 1, http)
        await controller.wait_serving(2, 20)
        undisturbed = await draw(generate, 8)
        calls = asyncio.ensure_future(draw(generate, 8))
        await asyncio.sleep(0.15)
        fleet.kill(router, told=told)
        again = await asyncio.to_thread(fleet.router, ports=router.ports, n=2, listed=told)
        assert [one.token_ids for one in await calls] == [one.token_ids for one in undisturbed]
        assert generate.retries > 0
        return again

    again = scenario(fleet, body)
    assert fleet.listed_by(again) == {engine.url for engine in engines}


def test_a_weight_update_with_requests_in_flight_shows_both_versions_in_their_spans(make_fleet):
    fleet = make_fleet(engines=1)
    fleet.controller()
    fleet.router()
    fleet.engine(0, token_ms=300)

    async def body(http, controller, generate):
        await publish(fleet, controller, 1, http)
        await controller.wait_serving(1, 20)
        calls = asyncio.ensure_future(draw(generate, 6))
        await asyncio.sleep(0.8)
        result, _ = await publish(fleet, controller, 2, http)
        assert result.failed == {}
        return await calls

    drawn = scenario(fleet, body)
    versions = {tuple(version for version, _, _ in one.weight_versions) for one in drawn}
    assert versions <= {(1, 2), (1,)} and (1, 2) in versions


def test_an_engine_killed_inside_a_window_is_replaced_and_the_window_ends_with_the_others(make_fleet):
    fleet = make_fleet(engines=2)
    fleet.controller()
    router = fleet.router()
    victim, other = fleet.engine(0), fleet.engine(1)

    async def body(http, controller, generate):
        window = await controller.start_update_weights(20)
        fleet.kill(victim, told=False)
        path = fleet.weights(1)
        result = await update_from_disk(window.engines, path, 1, http=http)
        assert [engine.cell for engine in result.updated] == [other.cell]
        ended = await controller.end_update_weights(window.window_id, 1, path)
        assert list(ended) == [victim.cell], "the controller looks by itself, although it was not told"
        fleet.hub.drop(victim.cell)
        await controller.wait_serving(1, 20)
        await asyncio.to_thread(fleet.engine, 0, ports=victim.ports, n=2)
        await controller.wait_serving(2, 20)
        await draw(generate, 8)

    scenario(fleet, body)
    assert [(m.cell, str(m.generation)) for m in fleet.hub.replaced] == [(victim.cell, "1-1")]
    assert fleet.listed_by(router) == {victim.url, other.url}


def test_a_new_controller_takes_the_fleet_over_from_engines_and_router(make_fleet):
    fleet = make_fleet(engines=2)
    first = fleet.controller()
    router = fleet.router()
    engines = [fleet.engine(0), fleet.engine(1)]

    async def body(http, controller, generate):
        await publish(fleet, controller, 3, http)
        await controller.wait_serving(2, 20)
        fleet.kill(first)
        await asyncio.to_thread(fleet.controller, n=2)
        await controller.published(3, fleet.weights(3))
        await controller.wait_serving(2, 20)
        loaded = [row.weight_version for row in (await controller.status()).engines]
        assert loaded == [3, 3]
        await publish(fleet, controller, 4, http)
        await controller.wait_serving(2, 20)
        await draw(generate, 4)

    scenario(fleet, body)
    assert fleet.listed_by(router) == {engine.url for engine in engines}


def test_the_controller_ends_promptly_on_sigterm(make_fleet):
    fleet = make_fleet(engines=1)
    controller = fleet.controller()
    fleet.router()
    fleet.engine(0)

    async def body(http, client, generate):
        await publish(fleet, client, 1, http)

    scenario(fleet, body)
    controller.process.terminate()
    assert controller.process.wait(15) == 0, controller.log.read_text()[-2000:]
