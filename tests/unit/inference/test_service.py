"""The controller against a router and engines that answer like the real ones, without a hub."""

import asyncio

import pytest

from miles_hpc.inference.book import engines_in, router_url_in, routers_in
from miles_hpc.inference.published import PublishedFile
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.inference.windows import ServingTimeout, WindowLost, WindowTimeout
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs

from .fleet import Fleet, run, two_engines, until

pytestmark = pytest.mark.unit


def test_engines_are_registered_by_the_end_of_the_first_window_and_not_before(parts):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        window = await fleet.start()
        assert [e.gpu_offset for e in window.engines] == [0, 1]
        assert router.calls == []
        await update_from_disk(window.engines, "/w/1", 1, http=p.http)
        assert await fleet.end(window, 1) == {"failed": {}}
        status = await fleet.serving(2)
        assert router.listed() == {e.url for e in engines}
        assert (status["published"], status["path"]) == (1, "/w/1")

    run(parts, scenario)


def test_a_healed_engine_at_the_same_url_takes_the_weights_before_it_is_registered_again(parts):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        await fleet.publish(4, p.http)
        await fleet.serving(2)
        fleet.drop("engine-policy-0", 0)
        await until(lambda: router.listed() == {engines[1].url})
        engines[0].label, engines[0].calls = "default", []
        fleet.put("engine-policy-0", 0, engines[0].url, n=2)
        await fleet.serving(2)
        assert engines[0].label == "4" and "/update_weights_from_disk" in engines[0].calls
        assert router.calls[-2:] == [f"remove {engines[0].url}", f"add {engines[0].url}"]
        assert fleet.replaced == []

    run(parts, scenario)


def test_a_restarted_router_gets_all_engines_again_with_and_without_a_new_generation(parts):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        router.workers.clear()  # restarted behind the hub's back: only looking finds it
        await until(lambda: router.listed() == {e.url for e in engines})
        other = await p.router()
        fleet.put("router-policy", 0, other.url, n=2)
        await until(lambda: other.listed() == {e.url for e in engines})

    run(parts, scenario)


def test_an_engine_that_is_not_in_the_address_book_is_taken_from_the_list(parts):
    async def scenario(p, fleet):
        router, _ = await two_engines(p, fleet)
        stranger = await p.engine()
        router.workers["x"] = {"id": "x", "url": stranger.url, "is_healthy": True}
        await until(lambda: stranger.url not in router.listed())

    run(parts, scenario)


def test_a_participant_that_does_not_report_the_version_is_replaced_even_if_its_updater_was_content(parts):
    async def scenario(p, fleet):
        _, engines = await two_engines(p, fleet)
        window = await fleet.start()
        await update_from_disk(window.engines, "/w/1", 1, http=p.http)
        engines[1].label = "default"
        answer = await fleet.end(window, 1)
        assert list(answer["failed"]) == ["engine-policy-0-00001"]
        assert [(cell, str(generation)) for cell, generation, _ in fleet.replaced] == [("engine-policy-0-00001", "1-1")]
        await fleet.serving(1)

    run(parts, scenario)


def test_a_window_that_its_owner_forgot_is_aborted_and_the_engines_serve_the_old_weights_again(parts):
    async def scenario(p, fleet):
        _, engines = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        window = await fleet.start()
        engines[0].paused, engines[0].label = "retract", "2"
        await until(lambda: fleet.service.state.window is None)
        with pytest.raises(WindowLost):
            await fleet.end(window, 2)
        await fleet.serving(2)
        assert [e.label for e in engines] == ["1", "1"]
        assert engines[0].paused is None

    run(parts, scenario, window_timeout_s=0.5)


def test_a_caller_that_is_cancelled_as_something_changes_waits_no_longer_and_blocks_nobody(parts):
    async def scenario(p, fleet):
        await two_engines(p, fleet)
        first = await fleet.start()
        second, third = (asyncio.ensure_future(fleet.start(20)) for _ in range(2))
        await until(lambda: len(fleet.service._turns) == 2)
        await asyncio.sleep(0.05)  # until both wait
        fleet.service._notify()
        second.cancel()
        await asyncio.wait({second}, timeout=5)
        assert second.cancelled() and not third.done()
        await fleet.service.abort_update_weights({"window_id": first.window_id}, [])
        assert (await third).window_id != first.window_id
        assert fleet.service._turns == [] and not fleet.service.state.window_wanted

    run(parts, scenario)


def test_a_second_window_waits_for_the_first_and_its_deadline_names_it(parts):
    async def scenario(p, fleet):
        await two_engines(p, fleet)
        first = await fleet.start()
        with pytest.raises(WindowTimeout, match=first.window_id):
            await fleet.start(timeout_s=0.2)
        second = asyncio.ensure_future(fleet.start())
        await asyncio.sleep(0.1)
        assert not second.done()
        await fleet.service.abort_update_weights({"window_id": first.window_id, "reason": "test"}, [])
        assert len((await second).engines) == 2

    run(parts, scenario)


def test_a_window_that_too_few_engines_join_times_out_with_their_states(parts):
    async def scenario(p, fleet):
        engine = await p.engine()
        engine.healthy = False
        fleet.put("engine-policy-0", 0, engine.url)
        with pytest.raises(WindowTimeout, match=r"0 of 2 engines are ready \(engine-policy-0-00000 initializing\)"):
            await fleet.start(timeout_s=0.3)
        with pytest.raises(ServingTimeout, match="0 of 1"):
            await fleet.serving(1, timeout_s=0.2)

    run(parts, scenario)


def test_an_engine_past_its_start_deadline_is_replaced(parts):
    async def scenario(p, fleet):
        engine = await p.engine()
        engine.healthy = False
        fleet.put("engine-policy-0", 0, engine.url)
        await until(lambda: fleet.replaced)
        assert "did not answer 200 within 0.3 s" in fleet.replaced[0][2]

    run(parts, scenario, start_deadline_s=0.3)


def test_a_controller_that_is_told_the_published_version_takes_a_running_fleet_over(parts):
    async def scenario(p, fleet):
        router, engines = await p.router(), [await p.engine(), await p.engine()]
        engines[0].label = "9"
        fleet.put("router-policy", 0, router.url)
        for index, engine in enumerate(engines):
            fleet.put("engine-policy-0", index, engine.url)
        await fleet.service.set_published({"version": 9, "path": "/w/9"}, [])
        await fleet.serving(2)
        assert "/update_weights_from_disk" not in engines[0].calls
        assert engines[1].label == "9"

    run(parts, scenario)


def test_a_router_is_only_named_to_generators_when_it_is_ready():
    def cell(ready, url="http://127.0.0.2:80"):
        workers = [{"http": HostAndPort.parse(url)}]
        return CellAddrs(
            cell="router-policy-00000", generation=Generation(1, 1), node="n", ready=ready, workers=workers
        )

    assert router_url_in({"router-policy": [cell(False)]}) is None
    assert router_url_in({"router-policy": [cell(True)]}) == "http://127.0.0.2:80"
    assert router_url_in({"engine-policy-0": [cell(True)]}) is None
    assert list(routers_in({"router-policy": [cell(False)]})) == ["router-policy-00000"]
    assert engines_in({"router-policy": [cell(True)]}) == []


def test_a_scheduler_that_stands_still_behind_a_living_server_is_replaced_and_a_paused_one_is_not(parts):
    async def scenario(p, fleet):
        engines = [await p.engine() for _ in range(2)]
        fleet.put("router-policy", 0, (await p.router()).url)
        for index, engine in enumerate(engines):
            fleet.put("engine-policy-0", index, engine.url)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        engines[0].paused = "in_place"
        engines[1].moves = False
        while not fleet.replaced:  # noqa: ASYNC110 - the list is the service's output
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        return fleet.replaced

    ((cell, _, reason),) = run(parts, scenario, stall_s=1.8)
    assert cell == "engine-policy-0-00001" and "no sign of life" in reason


def test_a_controller_that_comes_back_knows_what_is_published_and_loads_nothing_again(parts, tmp_path):
    directory = tmp_path / "weights" / "1"
    directory.mkdir(parents=True)

    async def scenario(p, first):
        engines = [await p.engine() for _ in range(2)]
        router = await p.router()

        def book(fleet):
            fleet.put("router-policy", 0, router.url)
            for index, engine in enumerate(engines):
                fleet.put("engine-policy-0", index, engine.url)

        book(first)
        window = await first.start()
        await update_from_disk(window.engines, str(directory), 1, http=p.http)
        end = {"window_id": window.window_id, "version": 1, "path": str(directory)}
        await first.service.end_update_weights(end, [])
        await first.serving(2)
        second = Fleet(p.http, published=PublishedFile(tmp_path, 0))
        second.service.on_pools(first.pools)
        running = asyncio.ensure_future(second.service.run(tick_s=0.05))
        try:
            await second.serving(2)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return [engine.calls.count("/update_weights_from_disk") for engine in engines], router.calls

    loads, calls = run(parts, scenario, published=PublishedFile(tmp_path, 0))
    assert loads == [1, 1]
    assert not any(call.startswith("remove") for call in calls)
