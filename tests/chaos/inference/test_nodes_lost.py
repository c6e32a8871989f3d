"""The engine's node, then the router's, lose power under requests: all are answered within a minute of DEAD."""

import asyncio
import os
import time

import pytest

from ..conftest import wait_for
from ..hub.namespaces import SpreadRun
from .clients import IN_FLIGHT, Book, Outside, whole

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SETTINGS = (
    "steps=4000",
    # An answer of a few tokens takes seconds: the blow falls in the middle of it.
    "inference.fake_token_ms=700",
    "rollout.batch_size=2",
    "session.servers=1",
    "timing.failover_max=17",
    "timing.hub_stall=18",
    "timing.fence=24",
)


async def lose_under_load(run, book, cell):
    """Loses the node of a cell with IN_FLIGHT requests of a client in all engines; seconds from DEAD, when the
    hub gives the cell another place, to the last answer."""
    node = book.homes[cell]
    async with Outside(book) as client:
        calls = client.begin()
        await client.in_flight(calls, engines=2, each=8)
        await asyncio.to_thread(run.lose, node)
        lost = time.monotonic()
        while book.homes.get(cell, node) == node:
            assert time.monotonic() - lost < 90
            await asyncio.sleep(0.05)
        dead = time.monotonic()
        assert whole(await calls)
        assert client.generate.retries > 0, "no request was on the lost node"
        return time.monotonic() - dead


def test_the_engines_node_then_the_routers_node_lose_power_under_32_requests_in_flight(tmp_path):
    run = SpreadRun(tmp_path / "lost", 5, *SETTINGS)
    book = None
    try:
        book = Book(run)
        run.reach(1)
        engines = [f"engine-policy-0-{index:05d}" for index in range(2)]
        wait_for(lambda: {"router-policy-00000", *engines} <= book.homes.keys(), "engines and the router")
        # The router is where the first hub is, so its loss is the hub's as well.
        router = book.homes["router-policy-00000"]
        victim = next(cell for cell in engines if book.homes[cell] != router)
        for cell in (victim, "router-policy-00000"):
            wait_for(lambda: len(book.engines) == 2 and book.router is not None, "all engines and the router", 120)
            took = asyncio.run(lose_under_load(run, book, cell))
            print(f"node of {cell}: all {IN_FLIGHT} requests answered {took:.1f} s after DEAD")
            assert took <= 60
    finally:
        if book is not None:
            book.close()
        run.close()
