"""The router's list: an addition counts when it is seen, a removal when it is gone."""

import asyncio

import pytest

from miles_hpc.inference.router_api import RouterApi, RouterError, RouterUnreachable

pytestmark = pytest.mark.unit


def run(parts, scenario):
    async def main():
        async with parts() as p:
            return await asyncio.wait_for(scenario(p), 20)

    return asyncio.run(main())


def test_an_addition_is_accepted_before_it_is_listed_and_may_be_repeated(parts):
    async def scenario(p):
        router = await p.router()
        router.delay_s = 1.0
        api = RouterApi(router.url, p.http)
        await api.add("http://127.0.0.1:9")
        await api.add("http://127.0.0.1:9")
        assert await api.workers() == []
        while not router.listed():  # noqa: ASYNC110 - the router's state
            await asyncio.sleep(0.01)
        return [(w.url, w.healthy) for w in await api.workers()]

    assert run(parts, scenario) == [("http://127.0.0.1:9", True)]


def test_a_removal_that_the_router_does_not_carry_out_is_named(parts):
    async def scenario(p):
        router = await p.router(await p.engine())
        router.delay_s = 30.0
        with pytest.raises(RouterError, match="still listed"):
            await RouterApi(router.url, p.http).remove(next(iter(router.listed())), timeout_s=0.2)

    run(parts, scenario)


def test_remove_waits_until_the_engine_is_gone_and_accepts_one_that_is_not_listed(parts):
    async def scenario(p):
        router = await p.router(await p.engine())
        router.delay_s = 0.2
        api = RouterApi(router.url, p.http)
        await api.remove(next(iter(router.listed())))
        assert router.listed() == set()
        await api.remove("http://127.0.0.1:9")

    run(parts, scenario)


def test_ranks_of_a_data_parallel_engine_are_one_engine(parts):
    async def scenario(p):
        router = await p.router()
        for rank in range(2):
            router.workers[f"r{rank}"] = {"id": f"r{rank}", "url": f"http://127.0.0.1:9@{rank}", "is_healthy": True}
        api = RouterApi(router.url, p.http)
        assert {w.url for w in await api.workers()} == {"http://127.0.0.1:9"}
        await api.remove("http://127.0.0.1:9")
        return router.listed()

    assert run(parts, scenario) == set()


def test_a_router_that_is_not_there_is_unreachable(parts):
    async def scenario(p):
        with pytest.raises(RouterUnreachable, match="/workers"):
            await RouterApi("http://127.0.0.1:1", p.http).workers()

    run(parts, scenario)
