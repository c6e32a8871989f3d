"""Both ends of the control plane over real sockets on the loopback address."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket as tcp
import threading
import time

import pytest
import zmq

from miles_hpc.wire import codec
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CancelRun,
    ClientHeartbeat,
    ClientHello,
    ClientWelcome,
    Done,
    FinishRun,
    Goodbye,
    Heartbeat,
    Refused,
    Shutdown,
    WorkerReady,
)
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import KeyPair, create_secrets, load_client, role_keys
from miles_hpc.wire.socket_options import prepare, prepare_client
from miles_hpc.wire.sockets import (
    HubLink,
    HubRefused,
    HubSocket,
    HubUnreachable,
    WrongHub,
    WrongKey,
    connect_hub,
)

pytestmark = pytest.mark.unit

LOCALHOST = HostAndPort("127.0.0.1", 0)
HELLO = ClientHello(worker="driver-00000-00000", generation=Generation(1, 1), pid=7)


@pytest.fixture
def hub(run_dir):
    keys = KeyPair.generate()
    socket = HubSocket(
        LOCALHOST, run_id="r1", keys=keys, roles=role_keys(run_dir, 1), domain=f"test-{secrets.token_hex(4)}"
    )
    socket.public_key = keys.public
    with socket:
        yield socket


def drain_until(hub, count=1, timeout_s=20.0, until=lambda: False):
    found, deadline = [], time.monotonic() + timeout_s
    while len(found) < count and not until() and time.monotonic() < deadline:
        hub.socket.poll(20)
        found += hub.drain()
    return found


def link_to(hub, run_dir, role="agent", run_id="r1"):
    link = HubLink(hub.address, hub_key=hub.public_key, keys=load_client(run_dir, 1, role), run_id=run_id)
    wait_up(link)
    return link


def wait_up(link, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        link.monitor.poll(100)
        if any(event.kind == "up" for event in link.events()):
            return
    raise AssertionError("the link did not come up")


def answers_of(link, timeout_s=20.0):
    assert link.socket.poll(int(timeout_s * 1000)), "the hub did not answer"
    return link.receive()


def rendezvous(hub, **changes):
    values = {"run_id": "r1", "port": hub.port, "public_key": hub.public_key, "addresses": ["127.0.0.1"], **changes}
    return Rendezvous(attempt=1, epoch=1, **values)


# ------------------------------------------------------------------------------------------ who is let in
def test_a_message_arrives_with_its_sender_and_role(hub, run_dir):
    with link_to(hub, run_dir) as link:
        assert link.send(Heartbeat(seq=1))
        (received,) = drain_until(hub)
        assert (received.role, received.message) == ("agent", Heartbeat(seq=1))
        assert hub.send(received.peer, Shutdown(reason="enough"))
        assert answers_of(link) == [Shutdown(reason="enough")]


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("worker", Heartbeat(seq=1)),
        ("worker", Goodbye()),
        ("worker", WorkerReady(worker="engine-00000-00000", generation=Generation(1, 1))),
        ("worker", CancelRun(call_id="c")),
        ("operator", Heartbeat(seq=1)),
        ("operator", FinishRun(outcome="finished")),
        ("agent", FinishRun(outcome="finished")),
        ("agent", CancelRun(call_id="c")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_role_cannot_send_what_is_for_another_role(hub, run_dir, role, message):
    with link_to(hub, run_dir, role) as link:
        link.send(message)
        assert drain_until(hub, until=lambda: hub.counters.forbidden) == []
        (refusal,) = answers_of(link)
        assert refusal == Refused(code="role", text=f"a {type(message).__name__} is not for role {role!r}")
        assert hub.counters.forbidden == 1


def test_a_role_that_the_hub_s_table_does_not_hold_is_not_admitted(run_dir):
    keys = KeyPair.generate()
    with HubSocket(
        LOCALHOST, run_id="r1", keys=keys, roles=role_keys(run_dir, 1, ("agent",)), domain="agents-only"
    ) as hub:
        hub.public_key = keys.public
        with pytest.raises(WrongKey):
            connect_hub(rendezvous(hub), load_client(run_dir, 1, "worker"), HELLO, timeout_s=20)
        assert hub.denied >= 1


def test_an_unknown_key_is_reported_by_name_within_3_s(hub):
    started = time.monotonic()
    with pytest.raises(WrongKey, match="does not know this process's key"):
        connect_hub(rendezvous(hub), KeyPair.generate(), HELLO, timeout_s=20)
    assert time.monotonic() - started < 3
    assert hub.denied >= 1
    assert hub.drain() == []


def test_a_key_of_another_attempt_is_unknown(hub, run_dir):
    create_secrets(run_dir, 2)
    with pytest.raises(WrongKey):
        connect_hub(rendezvous(hub), load_client(run_dir, 2, "agent"), HELLO, timeout_s=20)


def test_another_hub_at_the_address_is_reported_by_name_within_3_s(hub, run_dir):
    started = time.monotonic()
    with pytest.raises(WrongHub, match="not the hub of the rendezvous file"):
        connect_hub(
            rendezvous(hub, public_key=KeyPair.generate().public),
            load_client(run_dir, 1, "worker"),
            HELLO,
            timeout_s=20,
        )
    assert time.monotonic() - started < 3
    assert hub.drain() == []


def test_another_run_s_id_is_reported_by_name_within_3_s(hub, run_dir):
    with answering(hub, []):
        started = time.monotonic()
        with pytest.raises(HubRefused, match=r"belongs to run 'r1', this side to run 'r2'") as caught:
            connect_hub(rendezvous(hub, run_id="r2"), load_client(run_dir, 1, "worker"), HELLO, timeout_s=20)
        assert time.monotonic() - started < 3
        assert caught.value.code == "run"
    assert hub.counters.malformed == 1


def test_a_plain_socket_without_keys_reaches_nobody(hub):
    with zmq.Context.instance().socket(zmq.DEALER) as plain:
        prepare(plain, hub.address)
        plain.connect(hub.address.zmq)
        plain.send_multipart(codec.encode(Heartbeat(seq=1), "r1"))
        assert drain_until(hub, timeout_s=0.3) == []


def test_a_raw_tcp_peer_that_talks_nonsense_ends_nothing(hub, run_dir):
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b""):
        with tcp.create_connection(("127.0.0.1", hub.port)) as peer:
            peer.sendall(nonsense)
    with link_to(hub, run_dir) as link:
        link.send(Heartbeat(seq=1))
        assert [item.message for item in drain_until(hub)] == [Heartbeat(seq=1)]


def test_a_second_domain_admits_its_own_keys_only(run_dir):
    first, second = KeyPair.generate(), KeyPair.generate()
    outsider = KeyPair.generate()
    with (
        HubSocket(LOCALHOST, run_id="r1", keys=first, roles=role_keys(run_dir, 1), domain="one") as one,
        HubSocket(LOCALHOST, run_id="r1", keys=second, roles={outsider.public.encode(): "agent"}, domain="two") as two,
    ):
        one.public_key, two.public_key = first.public, second.public
        with pytest.raises(WrongKey):
            connect_hub(rendezvous(one), outsider, HELLO, timeout_s=20)
        with pytest.raises(WrongKey):
            connect_hub(rendezvous(two), load_client(run_dir, 1, "agent"), HELLO, timeout_s=20)
        with HubLink(two.address, hub_key=second.public, keys=outsider, run_id="r1") as link:
            wait_up(link)
            link.send(Heartbeat(seq=1))
            assert drain_until(two)[0].role == "agent"


# ------------------------------------------------------------------------------------------ what gets through
@pytest.mark.parametrize("frames", [[b""], [b"mhpc\x01r1"], [b"mhpc\x01r1", b"\xc1"], [b"x", b"y", b"z"]], ids=repr)
def test_what_does_not_decode_is_counted_and_answered(hub, run_dir, frames):
    with link_to(hub, run_dir) as link:
        link.socket.send_multipart(frames)
        link.send(Heartbeat(seq=2))
        assert [item.message for item in drain_until(hub)] == [Heartbeat(seq=2)]
        assert hub.counters.malformed == 1
        (refusal,) = answers_of(link)
        assert refusal.code == "malformed"


def test_another_protocol_version_is_answered_by_name(hub, run_dir):
    with link_to(hub, run_dir) as link:
        link.socket.send_multipart([b"mhpc\x63r1", b"from the future"])
        drain_until(hub, until=lambda: hub.counters.malformed)
        (refusal,) = answers_of(link)
        assert refusal.code == "version"


def test_a_drain_takes_no_more_than_its_limit(hub, run_dir):
    with link_to(hub, run_dir) as link:
        for seq in range(10):
            link.send(Heartbeat(seq=seq))
        first = []
        while len(first) < 3:
            hub.socket.poll(1000)
            first += hub.drain(limit=3 - len(first))
        rest = drain_until(hub, 7)
        assert [item.message.seq for item in [*first, *rest]] == list(range(10))


def test_a_drain_of_an_idle_socket_returns_at_once(hub):
    started = time.monotonic()
    assert hub.drain() == []
    assert time.monotonic() - started < 1


def test_a_send_to_a_peer_that_never_was_is_counted(hub):
    assert hub.send(b"nobody", Shutdown(reason="x")) is False
    assert hub.counters.unroutable == 1


def test_a_send_to_a_full_peer_returns_at_once_and_is_counted(run_dir):
    keys = KeyPair.generate()
    with HubSocket(
        LOCALHOST, run_id="r1", keys=keys, roles=role_keys(run_dir, 1), domain="full", queue_limit=10
    ) as hub:
        hub.public_key = keys.public
        with link_to(hub, run_dir) as link:
            link.send(Heartbeat(seq=1))
            peer = drain_until(hub)[0].peer
            large = Shutdown(reason="x" * 1_000_000)
            sent = sum(hub.send(peer, large) for _ in range(500))
            assert sent < 500
            assert hub.counters.full == 500 - sent


def test_a_message_that_is_too_large_is_counted_and_costs_no_connection(hub, run_dir, monkeypatch, caplog):
    with link_to(hub, run_dir) as link:
        assert link.send(Heartbeat(seq=1))
        (received,) = drain_until(hub)
        monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1000)
        assert link.send(Goodbye(reason="x" * 1000)) and link.dropped == 1, "nobody is to say it again"
        assert not hub.send(received.peer, Shutdown(reason="x" * 1000)) and hub.counters.oversized == 1
        assert caplog.text.count("a control message holds at most 1000") == 2
        assert hub.send(received.peer, Shutdown(reason="enough"))
        assert Shutdown(reason="enough") in answers_of(link)


def test_the_largest_message_gets_through(run_dir, monkeypatch):
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100_000)
    keys = KeyPair.generate()
    with HubSocket(LOCALHOST, run_id="r1", keys=keys, roles=role_keys(run_dir, 1)) as hub:
        hub.public_key = keys.public
        with link_to(hub, run_dir) as link:
            overhead = len(codec.encode_body(Goodbye(reason="x" * 99_000))) - 99_000
            largest = Goodbye(reason="x" * (100_000 - overhead))
            assert len(codec.encode_body(largest)) == 100_000
            assert link.send(largest)
            (received,) = drain_until(hub)
            assert received.message == largest and link.dropped == 0
            biggest = Shutdown(reason="x" * (100_000 - len(codec.encode_body(Shutdown(reason="x" * 99_000))) + 99_000))
            assert hub.send(received.peer, biggest)
            assert answers_of(link) == [biggest]


def test_a_stranger_s_message_that_is_too_large_reaches_nobody(run_dir, monkeypatch):
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1000)
    keys = KeyPair.generate()
    with HubSocket(LOCALHOST, run_id="r1", keys=keys, roles=role_keys(run_dir, 1)) as hub:
        hub.public_key = keys.public
        with link_to(hub, run_dir) as link, link_to(hub, run_dir, "worker") as hostile:
            hostile.socket.send_multipart([codec.header("r1"), b"x" * 2000])
            assert link.send(Heartbeat(seq=1))
            assert [received.message for received in drain_until(hub)] == [Heartbeat(seq=1)]
            assert hostile.monitor.poll(20_000) and hostile.events()[0].kind == "down"
            wait_up(hostile)  # its connection alone was cut, and ZeroMQ made another
            assert link.send(Heartbeat(seq=2))
            assert [received.message for received in drain_until(hub)] == [Heartbeat(seq=2)]


def test_a_heartbeat_is_answered_only_after_the_hub_s_next_turn(hub, run_dir):
    with link_to(hub, run_dir) as link:
        link.send(Heartbeat(seq=1))
        drain_until(hub)
        assert not link.socket.poll(100)
        hub.drain()
        assert link.socket.poll(20_000)
        before = link.silent_for()
        assert link.receive() == []
        assert link.silent_for() < before


def test_a_hub_of_many_agents_answers_every_second_of_their_heartbeats_and_all_of_programs(hub, run_dir):
    hub.answer_every = 2
    with link_to(hub, run_dir) as agent, link_to(hub, run_dir, "worker") as program:
        for seq in (1, 2, 3, 4):
            assert agent.send(Heartbeat(seq=seq)) and program.send(ClientHeartbeat(seq=seq))
        assert len(drain_until(hub, 8)) == 8
        hub.drain(0)

        def answered(link, count):
            found = []
            while len(found) < count:
                assert link.socket.poll(20_000), found
                found.append(codec.decode_from_hub(link.socket.recv_multipart(), "r1").seq)
            return found

        assert answered(program, 4) == [1, 2, 3, 4] and answered(agent, 2) == [2, 4]
        assert not agent.socket.poll(50)


def test_a_call_id_gets_its_receipt_after_the_hub_s_next_turn(hub, run_dir):
    with link_to(hub, run_dir, "worker") as link:
        link.send(FinishRun(outcome="finished", call_id="c1"))
        link.send(FinishRun(outcome="finished"))
        drain_until(hub, 2)
        assert not link.socket.poll(50)
        hub.drain()
        assert answers_of(link) == [Done(call_id="c1")]


def test_a_link_that_is_not_up_refuses_to_send(run_dir):
    with HubLink(
        HostAndPort("127.0.0.1", 1), hub_key=KeyPair.generate().public, keys=KeyPair.generate(), run_id="r1"
    ) as link:
        assert link.send(Heartbeat(seq=1)) is False
        assert link.dropped == 1


def test_a_link_says_when_it_breaks_and_when_it_is_back(run_dir, rebind):
    keys = KeyPair.generate()

    def listen(port):
        return HubSocket(
            HostAndPort("127.0.0.1", port), run_id="r1", keys=keys, roles=role_keys(run_dir, 1), domain="again"
        )

    first = listen(0)
    first.public_key = keys.public
    with link_to(first, run_dir) as link:
        first.close()
        deadline = time.monotonic() + 20
        events = []
        while not events and time.monotonic() < deadline:
            link.monitor.poll(100)
            events = link.events()
        assert [event.kind for event in events] == ["down"]
        link.send(Heartbeat(seq=1))  # must not wait for the next hub: it would be stale there
        with rebind(lambda: listen(first.port)) as second:
            wait_up(link)
            assert link.send(Heartbeat(seq=2))
            assert [item.message for item in drain_until(second)] == [Heartbeat(seq=2)]


def test_a_peer_that_reconnects_with_its_own_id_is_heard(hub, run_dir):
    keys, context = load_client(run_dir, 1, "agent"), zmq.Context.instance()
    sockets = []
    for seq in (1, 2):
        socket = context.socket(zmq.DEALER)
        sockets.append(socket)
        prepare(socket, hub.address)
        prepare_client(socket, keys, hub.public_key)
        socket.set(zmq.ROUTING_ID, b"same")
        socket.connect(hub.address.zmq)
        socket.poll(20_000, zmq.POLLOUT)
        socket.send_multipart(codec.encode(Heartbeat(seq=seq), "r1"))
        assert [item.message for item in drain_until(hub)] == [Heartbeat(seq=seq)]
    assert hub.send(b"same", Shutdown(reason="x"))
    assert sockets[1].poll(20_000)
    for socket in sockets:
        socket.close()


def test_an_address_in_use_is_named(hub, run_dir):
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{hub.port}") as caught:
        HubSocket(hub.address, run_id="r1", keys=KeyPair.generate(), roles={}, domain="busy")
    assert caught.value.errno == errno.EADDRINUSE


def test_a_hub_listens_on_all_its_addresses_with_one_port(run_dir, caplog):
    keys = KeyPair.generate()
    also = ["127.0.0.3", "192.0.2.1"]
    with HubSocket(HostAndPort("127.0.0.2", 0), run_id="r1", keys=keys, roles=role_keys(run_dir, 1), also=also) as hub:
        assert hub.hosts == ["127.0.0.2", "127.0.0.3"] and "192.0.2.1" in caplog.text
        for host in hub.hosts:
            endpoint = HostAndPort(host, hub.port)
            agent = load_client(run_dir, 1, "agent")
            with HubLink(endpoint, hub_key=keys.public, keys=agent, run_id="r1") as link:
                assert link.monitor.poll(5000) and [event.kind for event in link.events()] == ["up"]


def test_ipv6_works_where_the_machine_has_it(run_dir):
    keys = KeyPair.generate()
    try:
        hub = HubSocket(HostAndPort("::1", 0), run_id="r1", keys=keys, roles=role_keys(run_dir, 1), domain="six")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    hub.public_key = keys.public
    with hub, link_to(hub, run_dir) as link:
        link.send(Heartbeat(seq=1))
        assert len(drain_until(hub)) == 1


# ------------------------------------------------------------------------------------------ connect_hub
class answering:
    """Drains a hub in a thread and answers every hello with these messages."""

    def __init__(self, hub, answers):
        self.hub, self.answers, self.stop = hub, answers, False
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.stop:
            self.hub.socket.poll(10)
            for received in self.hub.drain():
                for answer in self.answers:
                    self.hub.send(received.peer, answer)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.stop = True
        self.thread.join()


WELCOME = ClientWelcome(epoch=1, run_id="r1", attempt=1)


def test_the_first_address_that_answers_is_kept(hub, run_dir):
    # Nobody listens at 127.0.0.9; the others take connections and say nothing, as where a firewall swallows all: who
    # tried one after the other would wait there until the end.
    silent = ["127.0.0.8", "127.0.0.7"]
    where = rendezvous(hub, addresses=["127.0.0.9", *silent, "127.0.0.1"])
    with contextlib.ExitStack() as listeners, answering(hub, [WELCOME]):
        for host in silent:
            listeners.enter_context(tcp.create_server((host, hub.port)))
        link, answer = connect_hub(where, load_client(run_dir, 1, "worker"), HELLO, timeout_s=20)
        with link:
            assert answer == WELCOME
            assert link.endpoint.host == "127.0.0.1"


def test_a_refusal_is_raised_with_its_code(hub, run_dir):
    with answering(hub, [Refused(code="superseded", text="a newer one runs")]):
        with pytest.raises(HubRefused, match=r"superseded.*a newer one runs") as caught:
            connect_hub(rendezvous(hub), load_client(run_dir, 1, "worker"), HELLO, timeout_s=20)
    assert caught.value.code == "superseded"


def test_a_hub_that_does_not_answer_is_unreachable_in_time(hub, run_dir):
    started = time.monotonic()
    with pytest.raises(HubUnreachable, match="left a hello unanswered"):
        connect_hub(rendezvous(hub), load_client(run_dir, 1, "worker"), HELLO, timeout_s=0.5)
    assert time.monotonic() - started < 3


def test_nobody_at_the_addresses_is_unreachable_in_time(run_dir):
    nobody = Rendezvous(
        run_id="r1", attempt=1, epoch=4, addresses=["127.0.0.1"], port=1, public_key=KeyPair.generate().public
    )
    started = time.monotonic()
    with pytest.raises(HubUnreachable, match=r"epoch 4 at 127\.0\.0\.1:1 within 0\.3 s"):
        connect_hub(nobody, load_client(run_dir, 1, "worker"), HELLO, timeout_s=0.3)
    assert time.monotonic() - started < 3
