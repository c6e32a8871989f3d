"""A broadcast and a controller that took its window for lost, on one engine: nothing is sent into one that serves."""

import asyncio

import pytest

from miles_hpc.inference.broadcast import BroadcastBroke, TensorHeader, update_from_sender
from miles_hpc.wire.address import HostAndPort

from .fleet import run, two_engines, until

pytestmark = pytest.mark.unit


class Sender:
    """Two parts of one tensor each; `meanwhile` runs while the group is made."""

    backend = "gloo"
    buckets = ((TensorHeader("a", "float32", (2, 2)),), (TensorHeader("b", "float32", (2,)),))

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile, self.sent, self.left = meanwhile, [], False

    def join(self, address, *, world_size, name, timeout_s):
        self.meanwhile()

    def send(self, bucket):
        self.sent.append(bucket)

    def leave(self):
        self.left = True


def broadcast(p, window, sender, version=2):
    return update_from_sender(window.engines, sender, version, HostAndPort("127.0.0.1", 1), http=p.http)


def test_a_broadcast_updates_paused_engines_and_continues_them(parts):
    async def scenario(p, fleet):
        _, engines = await two_engines(p, fleet)
        window, sender = await fleet.start(), Sender()
        assert (await broadcast(p, window, sender)).failed == {}
        assert sender.sent == [0, 1] and sender.left
        assert [(e.label, e.paused, e.session) for e in engines] == [("2", None, False)] * 2

    run(parts, scenario)


def test_nothing_is_sent_into_an_engine_that_was_continued_before_the_broadcast_began(parts):
    async def scenario(p, fleet):
        _, engines = await two_engines(p, fleet)
        window = await fleet.start()
        sender = Sender(lambda: setattr(engines[1], "paused", None))
        with pytest.raises(BroadcastBroke, match=f"{engines[1].url} was continued before anything was sent"):
            await broadcast(p, window, sender)
        assert sender.sent == [] and sender.left
        assert not any(e.session for e in engines)

    run(parts, scenario)


def test_an_engine_that_is_continued_takes_nothing_more_of_a_session_that_was_open(parts):
    async def scenario(p, fleet):
        _, engines = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        window = await fleet.start()
        for engine in engines:
            engine.paused, engine.session = "retract", True
        await fleet.service.abort_update_weights({"window_id": window.window_id}, [])
        await fleet.serving(2)
        assert [(e.label, e.paused, e.session) for e in engines] == [("1", None, False)] * 2
        assert fleet.replaced == []

    run(parts, scenario)


def test_an_engine_that_is_sent_weights_while_it_is_continued_is_replaced_without_having_served(parts):
    async def scenario(p, fleet):
        router, engines = await two_engines(p, fleet)
        await fleet.publish(1, p.http)
        await fleet.serving(2)
        window = await fleet.start()
        engines[0].paused = "retract"
        engines[0].before["/continue_generation"] = lambda: setattr(engines[0], "session", True)
        router.calls.clear()
        await fleet.service.abort_update_weights({"window_id": window.window_id}, [])
        await until(lambda: fleet.replaced)
        await asyncio.sleep(0.3)  # some rounds of its router
        ((cell, _, reason),) = fleet.replaced
        assert cell == "engine-policy-0-00000" and "somebody still sends it weights" in reason
        assert f"add {engines[0].url}" not in router.calls and router.listed() == {engines[1].url}

    run(parts, scenario)
