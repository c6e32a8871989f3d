"""Two sockets that look like one to the hub, and share nothing that could be used up."""

from __future__ import annotations

import time

import pytest
import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.hub_sockets import BULK_QUEUE_LIMIT, BULK_TURN, HubSockets
from miles_hpc.wire.messages import DumpReply, GetDump, Heartbeat
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import KeyPair, create_secrets, load_client, role_keys
from miles_hpc.wire.sockets import HubLink, WrongKey, connect_hub

pytestmark = pytest.mark.unit


@pytest.fixture
def hub(tmp_path):
    create_secrets(tmp_path, 0)
    keys = KeyPair.generate()
    with HubSockets(HostAndPort("127.0.0.1", 0), run_id="r", keys=keys, roles=role_keys(tmp_path, 0)) as made:
        made.run_dir, made.public_key = tmp_path, keys.public
        yield made


def _link(hub: HubSockets, role: str) -> HubLink:
    port = hub.bulk_port if role == "operator" else hub.port
    keys = load_client(hub.run_dir, 0, role)
    link = HubLink(HostAndPort("127.0.0.1", port), hub_key=hub.public_key, keys=keys, run_id="r")
    assert link.monitor.poll(5000) and [event.kind for event in link.events()] == ["up"]
    return link


def _take(hub: HubSockets, wanted: int) -> list:
    found, deadline = [], time.monotonic() + 10
    while len(found) < wanted:
        assert time.monotonic() < deadline, found
        for socket in hub.pollable:
            socket.poll(5)
        found += hub.drain()
    return found


def test_an_answer_goes_back_on_the_socket_that_the_question_came_from(hub):
    with _link(hub, "agent") as agent, _link(hub, "operator") as operator:
        assert agent.send(Heartbeat(seq=1)) and operator.send(GetDump(call_id="c"))
        for peer, role, message in _take(hub, 2):
            if isinstance(message, GetDump):
                assert role == "operator" and hub.send(peer, DumpReply(call_id="c", content={}))
        hub.drain(0)
        assert operator.socket.poll(5000) and operator.receive() == [DumpReply(call_id="c", content={})]
        assert agent.socket.poll(5000) and agent.receive() == [] and agent.silent_for() < 5


def test_only_a_control_link_ends_when_its_reader_takes_nothing_for_a_while(hub):
    control, bulk = hub.pollable
    assert control.get(zmq.TCP_MAXRT) == 10_000 and bulk.get(zmq.TCP_MAXRT) <= 0
    where = HostAndPort("127.0.0.1", hub.bulk_port)
    for is_bulk in (False, True):
        keys = load_client(hub.run_dir, 0, "operator")
        with HubLink(where, hub_key=hub.public_key, keys=keys, run_id="r", bulk=is_bulk) as link:
            assert (link.socket.get(zmq.TCP_MAXRT) == 10_000) is not is_bulk


def test_connections_of_the_hub_copy_what_comes_which_takes_a_page_less_each(hub):
    zero_copy_recv = 10  # of zmq.h; pyzmq has no name for it
    assert zmq.Context.instance().get(zero_copy_recv) == 0


def test_each_role_is_admitted_to_its_own_socket_only(hub):
    for role, bulk in (("operator", False), ("agent", True), ("worker", True)):
        found = Rendezvous(
            run_id="r",
            attempt=0,
            epoch=1,
            addresses=["127.0.0.1"],
            port=hub.port,
            bulk_port=hub.bulk_port,
            public_key=hub.public_key,
        )
        with pytest.raises(WrongKey):
            connect_hub(found, load_client(hub.run_dir, 0, role), GetDump(call_id="c"), timeout_s=5, bulk=bulk)
    assert hub.denied >= 3


def test_an_operator_who_floods_and_does_not_read_delays_no_heartbeat(hub):
    answer = DumpReply(call_id="c", content={"text": "x" * 100_000})
    with _link(hub, "agent") as agent, _link(hub, "operator") as operator:
        deadline = time.monotonic() + 20
        while hub.counters.full <= 10:
            assert time.monotonic() < deadline, f"{BULK_QUEUE_LIMIT} answers of {len(answer.content['text'])} bytes fit"
            operator.send(GetDump(call_id="c"))
            turn = hub.drain()
            assert sum(isinstance(message, GetDump) for _, _, message in turn) <= BULK_TURN
            for peer, _, message in turn:
                if isinstance(message, GetDump):
                    hub.send(peer, answer)
        assert agent.send(Heartbeat(seq=1))
        seen = [m for _, _, m in _take_role(hub, "agent")]
        assert seen == [Heartbeat(seq=1)]
        hub.drain(0)
        assert agent.socket.poll(5000)
        agent.receive()
        assert agent.dropped == 0 and agent.heard_at is not None
        assert hub._control.counters.full == 0


def _take_role(hub: HubSockets, role: str) -> list:
    deadline = time.monotonic() + 10
    while True:
        assert time.monotonic() < deadline
        hub.pollable[0].poll(20)
        found = [received for received in hub.drain() if received.role == role]
        if found:
            return found
