"""Requests of a client outside of a run, through the run's router, and what the run's hub says of its address book."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp

from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.wire.address import HostAndPort

from ..conftest import WholeRun

IN_FLIGHT = 32
LONG = SamplingParams(max_new_tokens=16, seed=3)
VOCABULARY = 384


class Book(threading.Thread):
    """Asks the hub ten times a second for what the run's own programs get pushed."""

    def __init__(self, run: WholeRun) -> None:
        super().__init__(daemon=True)
        self.run_ = run
        self.router: str | None = None
        self.controller: HostAndPort | None = None
        self.engines: dict[Any, str] = {}
        self.homes: dict[str, int] = {}
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ending.wait(0.1):
            status = self.run_.status()
            if status is None:
                continue
            hosts = {node.node: node.address for node in status.nodes}
            living = [
                cell
                for cell in status.cells
                if cell.state in ("starting", "ready") and cell.workers and cell.node in hosts
            ]
            ports = {cell.cell: (cell, hosts[cell.node], cell.workers[0].ports) for cell in living}
            self.engines = {
                (cell.cell, cell.generation): f"http://{host}:{port['http']}"
                for cell, host, port in ports.values()
                if cell.pool == "engine-policy-0" and "http" in port
            }
            routers = [
                f"http://{host}:{port['http']}"
                for cell, host, port in ports.values()
                if cell.pool == "router-policy" and cell.state == "ready"
            ]
            self.router = routers[0] if routers else None
            control = [
                HostAndPort(host, port["rpc"]) for cell, host, port in ports.values() if cell.pool == "controller"
            ]
            self.controller = control[0] if control else None
            self.homes = {cell.cell: int(cell.node[-5:]) for cell in living}

    def close(self) -> None:
        self._ending.set()
        self.join(10)


class Outside:
    """A client of a run for one scenario: `async with Outside(book) as client`."""

    def __init__(self, book: Book) -> None:
        self.book = book

    async def __aenter__(self) -> Outside:
        self.http = open_http()
        book = self.book
        self.generate = GenerateClient(
            lambda: book.router, self.http, VOCABULARY, published_only=True, engines=lambda: book.engines
        )
        self.controller = ControllerClient.at(lambda: book.controller, book.run_.run_dir, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.controller.close()
        await self.http.close()

    def begin(self, deadline_s: float = 200.0) -> asyncio.Future[list[Any]]:
        """IN_FLIGHT requests; each result is an answer or an error."""
        calls = (self.generate.generate([40, 50, 60 + i], LONG, deadline_s=deadline_s) for i in range(IN_FLIGHT))
        return asyncio.gather(*calls, return_exceptions=True)

    async def in_flight(self, calls: asyncio.Future[list[Any]], engines: int, each: int) -> None:
        """Until every one of that many engines runs at least `each` requests."""
        while True:
            loads = await asyncio.gather(*map(self.running, self.book.engines.values()))
            if len(loads) == engines and min(loads) >= each:
                return
            # Each call has a deadline, so this ends.
            assert not calls.done(), f"all were answered before each engine had {each}: {loads}"
            await asyncio.sleep(0.02)

    async def running(self, url: str) -> int:
        """Requests that an engine runs at this moment."""
        try:
            async with self.http.get(f"{url}/v1/loads", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                return int((await answer.json())["loads"][0]["num_running_reqs"])
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return 0


def whole(answers: list[Any]) -> bool:
    """Whether each request was answered in full; raises the first error that one of them met."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return all(one.token_ids and one.finish_reason in ("stop", "length") for one in answers)
