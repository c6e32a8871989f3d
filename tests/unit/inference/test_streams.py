"""Streamed answers: cut ones are lost, silent ones are judged by what the engines say."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_hpc.inference import streams
from miles_hpc.inference.generate import GenerateClient, GenerateRejected, RequestLost, SamplingParams
from miles_hpc.inference.http_session import open_http
from miles_hpc.wire.ids import Generation

from .fleet import until

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_new_tokens=3)
ENGINE = ("engine-policy-0-00000", Generation(1, 1))


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch):
    monkeypatch.setattr(streams, "_LOOK_S", 0.1)


class Peer:
    """Router and engine in one: streams by script, answers `/ready` and `/v1/loads` as it is told."""

    def __init__(self, make_answer, scripts):
        self.make_answer, self.scripts = make_answer, list(scripts)
        self.requests = 0
        self.peers = set()
        self.ready, self.waiting = 200, 0

    async def start(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/ready", self.on_ready)
        app.router.add_get("/v1/loads", self.on_loads)
        self.server = TestServer(app, host="127.0.0.1")
        await self.server.start_server()
        self.url = f"http://127.0.0.1:{self.server.port}"

    async def on_ready(self, request):
        return web.Response(status=self.ready)

    async def on_loads(self, request):
        return web.json_response({"loads": [{"num_waiting_reqs": self.waiting}]})

    async def generate(self, request):
        body = await request.json()
        assert body["stream"] is True
        self.requests += 1
        self.peers.add(request.transport.get_extra_info("peername"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for step in self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]:
            if step == "part":
                part = self.make_answer(body["input_ids"][1:])
                part["meta_info"]["finish_reason"] = None
                await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            elif step == "whole":
                data = b"data: " + json.dumps(self.make_answer(body["input_ids"])).encode() + b"\n\n"
                await response.write(data[:20])
                await asyncio.sleep(0.02)
                await response.write(data[20:])
            elif step == "cut":
                data = b"data: " + json.dumps(self.make_answer(body["input_ids"])).encode() + b"\n"
                await response.write(data)
                await asyncio.sleep(0.02)
                await response.write(b"\ndata: [DO")
                await asyncio.sleep(0.02)
                await response.write(b"NE]\n\n")
            elif step == "error":
                await response.write(b'data: {"error":{"message":"too long"}}\n\n')
            elif step == "done":
                await response.write(b"data: [DONE]\n\n")
            else:
                await asyncio.sleep(step)
        return response


def run(make_answer, scripts, scenario):
    async def main():
        peer = Peer(make_answer, scripts)
        await peer.start()
        try:
            async with open_http() as http:
                return await asyncio.wait_for(scenario(peer, http), 25)
        finally:
            await peer.server.close()

    return asyncio.run(main())


def test_the_last_event_is_the_answer(make_answer):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100)
        return await client.generate([1, 2, 3], SAMPLING, deadline_s=5)

    assert run(make_answer, [["part", "whole", "done"]], scenario).token_ids == [3, 2, 1]


def test_pieces_may_end_anywhere(make_answer):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100)
        return await client.generate([1, 2, 3], SAMPLING, deadline_s=5)

    assert run(make_answer, [["part", "cut"]], scenario).token_ids == [3, 2, 1]


def test_a_connection_is_used_again_after_a_stream(make_answer):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100)
        for _ in range(3):
            await client.generate([1, 2, 3], SAMPLING, deadline_s=5)
        return sum(len(connections) for connections in http.connector._conns.values()), len(peer.peers)

    assert run(make_answer, [["part", "whole", "done"]], scenario) == (1, 1)


@pytest.mark.parametrize("first", ["given up", "cancelled"])
def test_a_cancellation_from_outside_is_one_even_when_the_request_is_given_up_at_the_same_time(make_answer, first):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100)
        call = asyncio.ensure_future(client.generate([1, 2, 3], SAMPLING, deadline_s=5))
        while not peer.requests:  # noqa: ASYNC110 - the peer's state
            await asyncio.sleep(0.01)
        (waiting,) = client._watch._in_flight
        if first == "cancelled":
            call.cancel()
        waiting.give_up(streams.Silent("by the test"))
        if first == "given up":
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run(make_answer, [[60]], scenario)


def test_a_look_at_the_engines_that_was_never_begun_is_made_again(make_answer):
    async def scenario(peer, http):
        watch = GenerateClient(lambda: peer.url, http, 100, engines=lambda: {ENGINE: peer.url}, idle_s=0.0)._watch

        async def looked_at():
            watch._look()
            assert watch._asking is not None

        await watch.over(peer.url, asyncio.get_running_loop().time() + 5).run(looked_at())
        assert watch._asking is None
        with pytest.raises(streams.Silent):
            await watch.over(peer.url, asyncio.get_running_loop().time() + 5).run(asyncio.sleep(3))

    run(make_answer, [[60]], scenario)


@pytest.mark.filterwarnings("error")
def test_a_request_whose_address_book_cannot_be_read_leaves_no_task(make_answer):
    async def scenario(peer, http):
        def engines():
            raise RuntimeError("no book")

        client = GenerateClient(lambda: peer.url, http, 100, engines=engines)
        before = asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="no book"):
            await client._watch.over(peer.url, asyncio.get_running_loop().time() + 5).run(asyncio.sleep(60))
        assert asyncio.all_tasks() == before and not client._watch._in_flight

    run(make_answer, [[60]], scenario)


def test_a_stream_without_done_is_a_loss_and_drawn_again(make_answer):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100)
        found = await client.generate([1, 2, 3], SAMPLING, deadline_s=5)
        return found.token_ids, peer.requests

    assert run(make_answer, [["part", "whole"], ["part"], ["whole", "done"]], scenario) == ([3, 2, 1], 3)


def test_an_error_event_refuses_the_request(make_answer):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100)
        with pytest.raises(GenerateRejected, match="too long"):
            await client.generate([1, 2, 3], SAMPLING, deadline_s=5)
        return peer.requests

    assert run(make_answer, [["error", "done"]], scenario) == 1


def test_when_an_engine_leaves_only_requests_that_stay_silent_are_drawn_again(make_answer):
    async def scenario(peer, http):
        book = {ENGINE: peer.url, ("engine-policy-0-00001", Generation(1, 1)): "http://127.0.0.1:9"}
        client = GenerateClient(lambda: peer.url, http, 100, engines=lambda: book)
        client._watch._suspect_s = 0.8
        silent = asyncio.ensure_future(client.generate([1, 2, 3], SAMPLING, deadline_s=20))
        await asyncio.sleep(0.3)
        talking = asyncio.ensure_future(client.generate([4, 5, 6], SAMPLING, deadline_s=20))
        await asyncio.sleep(0.3)
        del book[("engine-policy-0-00001", Generation(1, 1))]
        return (await silent).token_ids, (await talking).token_ids, peer.requests

    slow = [0.3, "part", 0.3, "part", 0.3, "part", 0.3, "part", 0.3, "part", "whole", "done"]
    scripts = [["part", 60], slow, ["whole", "done"]]
    assert run(make_answer, scripts, scenario) == ([3, 2, 1], [6, 5, 4], 3)


def test_when_an_engine_leaves_a_stream_that_has_always_been_slow_is_left_alone(make_answer, monkeypatch):
    monkeypatch.setattr("miles_hpc.inference.streams._LOOK_S", 0.05)

    async def scenario(peer, http):
        book = {ENGINE: peer.url, ("engine-policy-0-00001", Generation(1, 1)): "http://127.0.0.1:9"}
        client = GenerateClient(lambda: peer.url, http, 100, engines=lambda: book)
        client._watch._suspect_s = 0.2
        slow = asyncio.ensure_future(client.generate([1, 2, 3], SAMPLING, deadline_s=20))
        await until(lambda: any(one.pause for one in client._watch._in_flight), 20)
        del book[("engine-policy-0-00001", Generation(1, 1))]
        return (await slow).token_ids, peer.requests

    assert run(make_answer, [["part", 0.8, "part", 0.8, "whole", "done"]], scenario) == ([3, 2, 1], 1)


@pytest.mark.parametrize(("ready", "waiting"), [(503, 0), (200, 2)], ids=["paused", "queue"])
def test_silence_with_a_reason_is_waited_out(make_answer, ready, waiting):
    async def scenario(peer, http):
        peer.ready, peer.waiting = ready, waiting
        client = GenerateClient(lambda: peer.url, http, 100, engines=lambda: {ENGINE: peer.url}, idle_s=0.5)
        await client.generate([1, 2, 3], SAMPLING, deadline_s=20)
        return peer.requests

    assert run(make_answer, [["part", 1.5, "whole", "done"]], scenario) == 1


def test_silence_without_a_reason_is_a_loss(make_answer):
    async def scenario(peer, http):
        client = GenerateClient(lambda: peer.url, http, 100, engines=lambda: {ENGINE: peer.url}, idle_s=0.5)
        with pytest.raises(RequestLost, match="every engine answers"):
            await client.generate([1, 2, 3], SAMPLING, deadline_s=1.5)

    run(make_answer, [["part", 60]], scenario)
