"""A hub with several addresses: the first that answers is kept, and all are tried again when it is lost."""

from __future__ import annotations

import time

import pytest

from miles_hpc.agent.link import AgentLink
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import Goodbye, Heartbeat
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import KeyPair, create_secrets, load_client, role_keys
from miles_hpc.wire.sockets import HubSocket

pytestmark = pytest.mark.unit


@pytest.fixture
def run_dir(tmp_path):
    create_secrets(tmp_path, 0)
    return tmp_path


def _hub(run_dir, keys: KeyPair, host: str, port: int = 0) -> HubSocket:
    return HubSocket(HostAndPort(host, port), run_id="r", keys=keys, roles=role_keys(run_dir, 0))


def _until_up(link: AgentLink) -> None:
    deadline = time.monotonic() + 10
    while not any(event.kind == "up" for event in link.events()):
        assert time.monotonic() < deadline
        link.pollable()[-1].poll(50)


def _taken(hub: HubSocket, wanted: int) -> list[object]:
    deadline, found = time.monotonic() + 10, []
    while len(found) < wanted:
        assert time.monotonic() < deadline, found
        hub.socket.poll(50)
        found += [received.message for received in hub.drain()]
    return found


def test_the_address_that_answers_is_kept_and_all_are_tried_again_when_it_is_lost(run_dir):
    keys = KeyPair.generate()
    hub = _hub(run_dir, keys, "127.0.0.2")
    found = Rendezvous(
        run_id="r",
        attempt=0,
        epoch=1,
        addresses=["127.0.0.3", "192.0.2.1", "127.0.0.2"],
        port=hub.port,
        public_key=keys.public,
    )
    link = AgentLink(found, load_client(run_dir, 0, "agent"))
    try:
        _until_up(link)
        assert len(link.pollable()) == 2
        assert link.say(Heartbeat(seq=1))
        assert _taken(hub, 1) == [Heartbeat(seq=1)]
        link.on_welcome()
        hub.close()
        hub = _hub(run_dir, keys, "127.0.0.3", found.port)
        while link.welcomed:
            link.pollable()[-1].poll(50)
            link.events()
        link.report(Goodbye(reason="kept"))
        dropped = link.dropped
        link.probe_again()
        link.probe_again()
        assert len(link.pollable()) == 6
        _until_up(link)
        link.on_welcome()
        assert _taken(hub, 1) == [Goodbye(reason="kept")]
        assert link.dropped == dropped
    finally:
        link.close()
        hub.close()


def test_the_silence_of_the_hub_before_goes_on_until_the_next_one_speaks(run_dir):
    found = Rendezvous(
        run_id="r", attempt=0, epoch=2, addresses=["127.0.0.2"], port=1, public_key=KeyPair.generate().public
    )
    link = AgentLink(found, load_client(run_dir, 0, "agent"), heard_at=time.monotonic() - 50)
    assert 50 <= link.silent_for() < 60
    link.close()
