"""Real engines behind the real router under our controller: windows, versions in the tokens, and losses that cost no
request: each test says that work was in flight, and that all of it was answered."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_hpc.agent.essentials import Essentials
from miles_hpc.agent.probes import Finding
from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.inference.book import engine_urls_in, router_url_in
from miles_hpc.inference.broadcast import update_from_sender
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.engine_api import UNPUBLISHED, EngineApi
from miles_hpc.inference.generate import GenerateClient, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.weights import WeightsNotTaken, update_from_disk
from miles_hpc.specs.engine import engine_specs
from miles_hpc.train.make_model import make_model
from miles_hpc.train.sender import TensorSender
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

FLEET = sys.modules["sglang_fleet"]
VOCABULARY = 384
IN_FLIGHT = 32
LONG = SamplingParams(max_new_tokens=200, temperature=0.0)
LOST_S = 600.0
"""Deadline of requests that outlive an engine; it includes a start on a busy machine."""


class Session:
    """A client of each kind for one test, on the session's fleet."""

    def __init__(self, fleet: Any, http: Any, controller: ControllerClient) -> None:
        self.fleet, self.http, self.controller = fleet, http, controller
        self.generate = GenerateClient(
            lambda: router_url_in(fleet.pools),
            http,
            VOCABULARY,
            published_only=True,
            engines=lambda: engine_urls_in(fleet.pools),
        )

    def weights(self, version: int) -> Path:
        path = self.fleet.run_dir / "weights" / str(version)
        return path if path.exists() else make_model(MakeModelConfig(), version, path)

    async def publish(self) -> int:
        """The next version into all engines, from disk."""
        window = await self.controller.start_update_weights(LOST_S)
        version = self.fleet.version = getattr(self.fleet, "version", 0) + 1
        path = str(self.weights(version))
        result = await update_from_disk(window.engines, path, version, http=self.http)
        ended = await self.controller.end_update_weights(window.window_id, version, path, result.failed)
        assert (result.failed, ended) == ({}, {})
        await self.controller.wait_serving(len(self.fleet.engines), 60)
        return version

    def begin(self, count: int = IN_FLIGHT, sampling: SamplingParams = LONG) -> asyncio.Future[Any]:
        calls = (self.generate.generate([10, 20, 30 + i], sampling, deadline_s=LOST_S) for i in range(count))
        return asyncio.gather(*calls)

    async def in_flight(self) -> list[int]:
        """Running requests by engine, once each engine has some."""
        while True:
            loads = [await asyncio.to_thread(self.fleet.running, engine) for engine in self.fleet.engines]
            if min(loads) > 0:
                return loads
            await asyncio.sleep(0.05)

    async def until_listed(self, urls: set[str]) -> None:
        """Until the router has these engines as healthy, and no others."""
        fleet = self.fleet
        while await asyncio.to_thread(fleet.listed_by, fleet.router_program) != urls:  # noqa: ASYNC110 - its state
            await asyncio.sleep(0.02)

    async def heal(self, index: int) -> None:
        """What hub and agent do about a lost engine: out of the address book, a new generation on the old ports."""
        await asyncio.to_thread(self._heal, index)

    def _heal(self, index: int) -> None:
        old = self.fleet.engines[index]
        self.fleet.hub.drop(old.cell)
        self.fleet.end_tree(old)
        self.fleet.engines[index] = self.fleet.real_engine(index, ports=old.ports, n=old.n + 1, wait=False)

    async def state_of(self, cell: str) -> str:
        """The controller's word for an engine; empty while it is in no address book."""
        rows = (await self.controller.status()).engines
        return next((row.state for row in rows if row.cell == cell), "")

    async def serving(self) -> None:
        status = await self.controller.wait_serving(len(self.fleet.engines), LOST_S)
        assert {row.weight_version for row in status.engines} == {status.published}
        for engine in self.fleet.engines:
            await asyncio.to_thread(self.fleet.scheduler_of, engine)


def scenario(fleet: Any, body: Any) -> None:
    async def main() -> None:
        async with open_http(fleet.key) as http, ControllerClient(fleet) as controller:
            await asyncio.wait_for(body(Session(fleet, http, controller)), 1000)

    asyncio.run(main())


def whole(answers: list[Any]) -> bool:
    return all(len(one.token_ids) > 0 and one.finish_reason in ("stop", "length") for one in answers)


def test_versions_from_disk_are_seen_in_the_tokens_and_the_key_nowhere(pair):
    async def body(session):
        for _ in range(2):
            version = await session.publish()
            answers = await session.begin()
            assert whole(answers) and {v for one in answers for v, _, _ in one.weight_versions} == {version}
        key = pair.key
        for program in pair.programs:
            assert key not in program.log.read_text(errors="replace")
            # An earlier test may have killed it; its log counts all the same.
            for process in processes_of(program) if program.process.poll() is None else []:
                assert key not in " ".join(process.cmdline())

    scenario(pair, body)


@pytest.mark.parametrize("fault", ["shape", "name"])
def test_weights_that_do_not_fit_never_reach_an_engine_and_the_old_ones_keep_serving(pair, fault, tmp_path):
    async def body(session):
        version = await session.publish()
        bad = sys.modules["weight_contract"].misfit(session.weights(version), tmp_path / "misfit", fault)
        window = await session.controller.start_update_weights(60)
        with pytest.raises(WeightsNotTaken, match=r"do not fit the model: model\.layers\.0\.mlp\.down_proj\.weight"):
            await update_from_disk(window.engines, str(bad), version + 1, http=session.http)
        await session.controller.abort_update_weights(window.window_id, "misfit")
        await session.controller.wait_serving(2, 60)
        answers = await session.begin(4)
        assert whole(answers) and {v for one in answers for v, _, _ in one.weight_versions} == {version}
        for engine in pair.engines:
            assert engine.process.poll() is None

    scenario(pair, body)


def test_an_update_with_requests_in_flight_shows_both_versions(pair):
    async def body(session):
        old = await session.publish()
        calls = session.begin()
        await session.in_flight()
        new = await session.publish()
        answers = await calls
        assert whole(answers)
        assert any([v for v, _, _ in one.weight_versions] == [old, new] for one in answers)

    scenario(pair, body)


def test_a_broadcast_gives_what_a_load_from_disk_gives(pair):
    async def body(session):
        version = await session.publish()
        from_disk = [one.token_ids for one in await session.begin(8)]
        tensors = tensors_of(session.weights(version))
        await session.publish()
        window = await session.controller.start_update_weights(60)
        pair.version += 1
        address = HostAndPort("127.0.0.1", FLEET.free_port())
        sender = TensorSender(tensors, bucket_bytes=200_000)
        result = await update_from_sender(window.engines, sender, pair.version, address, http=session.http)
        ended = await session.controller.end_update_weights(window.window_id, pair.version, "", result.failed)
        assert (result.failed, ended, len(sender.buckets) > 1) == ({}, {}, True)
        await session.controller.wait_serving(2, 60)
        answers = await session.begin(8)
        assert {v for one in answers for v, _, _ in one.weight_versions} == {pair.version}
        assert [one.token_ids for one in answers] == from_disk
        await aborted_where_no_path_has_the_weights(session, pair)

    scenario(pair, body)


async def aborted_where_no_path_has_the_weights(session: Session, pair: Any) -> None:
    """Nobody knows what an owner that failed has left in the engines: they serve again from the next version on."""
    replaced = len(pair.hub.replaced)
    calls = session.begin()
    await session.in_flight()
    window = await session.controller.start_update_weights(60)
    await asyncio.gather(*(EngineApi(one.url, session.http).pause("retract") for one in window.engines))
    await session.controller.abort_update_weights(window.window_id, "its owner failed")
    await session.until_listed(set())
    for engine in pair.engines:
        api = EngineApi(engine.url, session.http)
        while await api.paused():  # noqa: ASYNC110 - the engine's state
            await asyncio.sleep(0.05)
        assert await api.weight_version() == UNPUBLISHED
        assert await session.state_of(engine.cell) == "pending-weights"
    assert not calls.done()
    new = await session.publish()
    assert whole(answers := await calls)
    # What was drawn before the abort is kept or drawn again; nothing is of the weights in between.
    assert {v for one in answers for v, _, _ in one.weight_versions} <= {new - 1, new}
    assert len(pair.hub.replaced) == replaced


def test_a_router_that_is_killed_has_all_engines_again_and_loses_no_request(pair):
    async def body(session):
        await session.publish()
        calls = session.begin()
        await session.in_flight()
        old = pair.router_program
        pair.kill(old)
        began = time.monotonic()
        pair.router_program = await asyncio.to_thread(pair.router, ports=old.ports, n=old.n + 1)
        wanted = {engine.url for engine in pair.engines}
        await session.until_listed(wanted)
        assert time.monotonic() - began < 30
        assert whole(await calls) and session.generate.retries > 0

    scenario(pair, body)


def test_an_engine_killed_under_load_loses_no_request_and_comes_back_with_the_weights(pair):
    async def body(session):
        await session.publish()
        calls = session.begin()
        await session.in_flight()
        victim, other = pair.engines
        os.kill(victim.process.pid, signal.SIGKILL)
        pair.hub.drop(victim.cell)
        began = time.monotonic()
        await session.until_listed({other.url})
        out_s = time.monotonic() - began
        await session.heal(0)
        assert whole(await calls)
        await session.serving()
        assert whole(await session.begin(8))
        assert out_s < 10

    scenario(pair, body)


def test_a_stopped_scheduler_behind_a_living_server_is_found_and_its_requests_are_answered(pair):
    async def body(session):
        await session.publish()
        calls = session.begin()
        await session.in_flight()
        stopped = pair.scheduler_of(pair.engines[1])
        before = len(pair.hub.replaced)
        began = time.monotonic()
        os.kill(stopped.pid, signal.SIGSTOP)
        while len(pair.hub.replaced) == before:
            assert time.monotonic() - began < 90
            await asyncio.sleep(0.1)
        found_s = time.monotonic() - began
        asked = pair.hub.replaced[-1]
        assert asked.cell == pair.engines[1].cell and "no sign of life" in asked.reason
        assert found_s <= 60
        await session.heal(1)
        assert whole(await calls)
        await session.serving()

    scenario(pair, body)


def test_an_engine_whose_scheduler_is_killed_is_found_before_its_own_watchdog_ends_it_and_nobody_misses_a_token(pair):
    async def body(session):
        await session.publish()
        calls = session.begin()
        await session.in_flight()
        engine, watch = pair.engines[0], Essentials(time.monotonic)
        parts = [child.pid for child in psutil.Process(engine.process.pid).children(recursive=True)]
        watched = watch.add(
            engine.cell, Generation(1, engine.n), parts, engine_specs(pair.config)[0].essential_processes
        )
        assert sorted(name.partition(" ")[0] for name in watched) == ["sglang::detokenizer", "sglang::scheduler"]
        scheduler = pair.scheduler_of(engine).pid
        os.kill(scheduler, signal.SIGKILL)
        began = time.monotonic()
        finding = await asyncio.to_thread(verdict_of, watch)
        found_s = time.monotonic() - began
        print(f"the scheduler's death was found after {found_s:.1f} s")
        assert f"sglang::scheduler (pid {scheduler}), without which it cannot go on" in finding.text and found_s < 5
        await session.heal(0)
        assert whole(await calls)
        await session.serving()

    scenario(pair, body)


def test_an_engine_killed_in_an_update_from_disk_fails_alone_and_its_replacement_loads_the_version(pair):
    async def body(session):
        await session.publish()
        calls = session.begin()
        await session.in_flight()
        window = await session.controller.start_update_weights(60)
        victim = next(engine for engine in pair.engines if engine.url == window.engines[0].url)
        pair.version += 1
        path = str(session.weights(pair.version))

        async def strike():
            while not await paused(session.http, victim.url):  # noqa: ASYNC110 - another program's state
                await asyncio.sleep(0.005)
            os.kill(victim.process.pid, signal.SIGKILL)

        struck = asyncio.ensure_future(strike())
        result = await update_from_disk(window.engines, path, pair.version, http=session.http)
        await struck
        ended = await session.controller.end_update_weights(window.window_id, pair.version, path, result.failed)
        assert set(ended) == {victim.cell}
        await session.heal(pair.engines.index(victim))
        assert whole(await calls)
        await session.serving()

    scenario(pair, body)


def test_an_engine_killed_in_a_broadcast_ends_the_window_within_a_bound_and_the_next_has_its_replacement(pair):
    async def body(session):
        version = await session.publish()
        calls = session.begin()
        await session.in_flight()
        window = await session.controller.start_update_weights(60)
        victim = pair.engines[0]
        scheduler = pair.scheduler_of(victim)
        sender = TensorSender(tensors_of(session.weights(version)), bucket_bytes=20_000)
        send = sender.send

        def strike(bucket: int) -> None:
            if bucket == 2:
                os.kill(scheduler.pid, signal.SIGKILL)
                os.kill(victim.process.pid, signal.SIGKILL)
            send(bucket)

        sender.send = strike
        began = time.monotonic()
        pair.version += 1
        with pytest.raises(WeightsNotTaken):
            address = HostAndPort("127.0.0.1", FLEET.free_port())
            await update_from_sender(window.engines, sender, pair.version, address, http=session.http, timeout_s=30.0)
        assert time.monotonic() - began < 90
        await session.controller.abort_update_weights(window.window_id, "an engine died in the broadcast")
        await session.heal(0)
        # The other one may hang in the broken group; then the controller has it replaced.
        deadline = time.monotonic() + LOST_S
        while await session.state_of(pair.engines[1].cell) != "serving":
            assert time.monotonic() < deadline
            if any(
                asked.cell == pair.engines[1].cell and asked.generation.n == pair.engines[1].n
                for asked in pair.hub.replaced
            ):
                await session.heal(1)
            await asyncio.sleep(0.2)
        assert whole(await calls)
        await session.serving()
        await session.publish()
        assert whole(await session.begin(8))

    scenario(pair, body)


def verdict_of(watch: Essentials) -> Finding:
    """The first finding, as an agent's loop waits for it."""
    while True:
        poller = select.poll()
        for fileno in watch.filenos():
            poller.register(fileno, select.POLLIN)
        wait_s = min(watch.next_deadline() - time.monotonic(), 60.0)
        ready = poller.poll(max(0.0, wait_s) * 1000)
        findings = watch.advance({fileno for fileno, _ in ready})
        if findings:
            return findings[0]
        assert ready or wait_s < 60.0, "nothing was found"


async def paused(http: Any, url: str) -> bool:
    async with http.get(f"{url}/ready") as answer:
        return answer.status == 503


def tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(path / "model.safetensors"))


def processes_of(program: Any) -> list[Any]:
    import psutil

    first = psutil.Process(program.process.pid)
    return [first, *first.children(recursive=True)]
