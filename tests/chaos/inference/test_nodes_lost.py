"""The engine's node, then the router's, lose power under requests: all are answered within a minute of DEAD."""

import asyncio
import os
import threading
import time

import aiohttp
import pytest

from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http

from ..conftest import wait_for
from ..hub.namespaces import SpreadRun

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

IN_FLIGHT = 32
SLOW = SamplingParams(max_new_tokens=16, seed=3)
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


class Book:
    """What the run's hub says of engines and router, as its own programs get it pushed; here it is asked for."""

    def __init__(self, run):
        self.run = run
        self.router = None
        self.engines = {}
        self.homes = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self):
        while not self._ending.wait(0.1):
            status = self.run.status()
            if status is None:
                continue
            hosts = {node.node: node.address for node in status.nodes}
            living = [cell for cell in status.cells if cell.state in ("starting", "ready") and cell.workers]
            urls = {
                cell.cell: (cell, f"http://{hosts[cell.node]}:{cell.workers[0].ports['http']}")
                for cell in living
                if "http" in cell.workers[0].ports
            }
            self.engines = {
                (name, cell.generation): url for name, (cell, url) in urls.items() if cell.pool == "engine-policy-0"
            }
            routers = [url for cell, url in urls.values() if cell.pool == "router-policy" and cell.state == "ready"]
            self.router = routers[0] if routers else None
            self.homes = {cell.cell: int(cell.node[-5:]) for cell in living}

    def close(self):
        self._ending.set()
        self._thread.join(10)


async def running(http, url):
    try:
        async with http.get(f"{url}/v1/loads", timeout=aiohttp.ClientTimeout(total=2)) as answer:
            return (await answer.json())["loads"][0]["num_running_reqs"]
    except (aiohttp.ClientError, asyncio.TimeoutError):
        return 0


async def lose_under_load(run, book, cell):
    """Loses the node of a cell with IN_FLIGHT requests of a client in all engines; seconds from DEAD, when the
    hub gives the cell another place, to the last answer."""
    node = book.homes[cell]
    async with open_http() as http:
        client = GenerateClient(
            lambda: book.router, http, 384, published_only=True, engines=lambda: book.engines, idle_s=30.0
        )
        calls = asyncio.gather(
            *(client.generate([40, 50, 60 + i], SLOW, deadline_s=200) for i in range(IN_FLIGHT)), return_exceptions=True
        )
        deadline = time.monotonic() + 60
        while True:
            loads = await asyncio.gather(*(running(http, url) for url in book.engines.values()))
            if len(loads) == 2 and min(loads) >= 8 and sum(loads) >= IN_FLIGHT:
                break
            assert time.monotonic() < deadline and not calls.done(), loads
            await asyncio.sleep(0.02)
        await asyncio.to_thread(run.lose, node)
        assert not calls.done(), "the requests were answered before the node was lost"
        lost = time.monotonic()
        while book.homes.get(cell, node) == node:
            assert time.monotonic() - lost < 90
            await asyncio.sleep(0.05)
        dead = time.monotonic()
        answers = await calls
        took = time.monotonic() - dead
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    assert not failures, failures[0]
    assert all(one.token_ids and one.finish_reason in ("stop", "length") for one in answers)
    assert client.retries > 0, "no request was on the lost node"
    return took


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
