import contextlib
import ctypes
import errno
import json
import stat
import threading
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import zmq

from miles_hpc.wire import messages, security
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import Heartbeat
from miles_hpc.wire.security import (
    DATA,
    ROLES,
    KeyPair,
    SecurityError,
    authenticator,
    create_secrets,
    load_client,
    load_http_key,
    load_keys,
    role_keys,
    secrets_dir,
    sender_may_send,
)
from miles_hpc.wire.sockets import HubLink, HubSocket

pytestmark = pytest.mark.unit

GOLDEN = json.loads((Path(__file__).parent / "golden" / "messages.json").read_text())["messages"]


def sample(kind):
    return msgspec.convert({"type": kind.__name__, **GOLDEN[f"{kind.__name__}.minimal"]["fields"]}, kind)


def test_secrets_are_for_the_owner_only(tmp_path):
    create_secrets(tmp_path, 1)
    directory = secrets_dir(tmp_path, 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert {f"{name}.json" for name in (*ROLES, DATA)} <= set(modes)
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700


def test_each_role_and_attempt_has_its_own_keys(tmp_path):
    create_secrets(tmp_path, 1)
    create_secrets(tmp_path, 2)
    found = [load_keys(tmp_path, attempt, name) for attempt in (1, 2) for name in (*ROLES, DATA)]
    assert len({keys.public for keys in found}) == len({keys.secret for keys in found}) == 8


def test_keys_that_exist_are_kept(tmp_path):
    create_secrets(tmp_path, 1)
    before = load_client(tmp_path, 1, "agent")
    create_secrets(tmp_path, 1)
    assert load_client(tmp_path, 1, "agent") == before


def test_missing_and_broken_keys_are_named(tmp_path):
    with pytest.raises(SecurityError, match=r"no agent key of attempt 1 in .*agent\.json"):
        load_client(tmp_path, 1, "agent")
    create_secrets(tmp_path, 1)
    (secrets_dir(tmp_path, 1) / "agent.json").write_text("{")
    with pytest.raises(SecurityError, match="no agent key"):
        load_client(tmp_path, 1, "agent")


@pytest.mark.parametrize(
    ("place", "mode"),
    [("agent.json", 0o640), ("agent.json", 0o604), ("", 0o750), ("", 0o701), ("http.key", 0o644)],
)
def test_keys_that_others_may_read_are_refused_by_name(tmp_path, place, mode):
    create_secrets(tmp_path, 0)
    path = secrets_dir(tmp_path, 0) / place
    path.chmod(mode)
    with pytest.raises(SecurityError, match=f"{path} has mode {mode:04o}"):
        load_http_key(tmp_path, 0) if place == "http.key" else load_client(tmp_path, 0, "agent")


def test_a_secret_does_not_get_into_logs():
    keys = KeyPair.generate()
    assert keys.secret not in repr(keys)
    assert keys.secret not in f"{[keys]}"


def test_role_keys_lists_the_public_halves(tmp_path):
    create_secrets(tmp_path, 1)
    worker = load_client(tmp_path, 1, "worker")
    assert role_keys(tmp_path, 1, ("worker",)) == {worker.public.encode(): "worker"}
    assert sorted(role_keys(tmp_path, 1).values()) == sorted(ROLES)


@pytest.mark.parametrize("kind", get_args(messages.ToHub), ids=lambda kind: kind.__name__)
def test_a_message_may_be_sent_by_one_role_only(kind):
    senders = {"agent": messages.FromAgent, "worker": messages.FromClient, "operator": messages.FromOperator}
    expected = [role for role, union in senders.items() if kind in get_args(union)]
    message = sample(kind)
    assert [role for role in ROLES if sender_may_send(role, message)] == expected
    assert len(expected) == 1


@pytest.mark.parametrize("role", ["", "None", "root", "data", "Agent"])
def test_an_unknown_role_may_send_nothing(role):
    assert not any(sender_may_send(role, sample(kind)) for kind in get_args(messages.ToHub))


def test_nobody_may_send_the_hub_its_own_orders():
    orders = set(get_args(messages.FromHub)) - set(get_args(messages.ToHub))
    assert not any(sender_may_send(role, sample(kind)) for role in ROLES for kind in orders)


def test_a_context_has_one_handler():
    with zmq.Context() as context:
        handler = authenticator(context)
        assert authenticator(context) is handler
        handler.close()


def test_a_request_that_is_no_zap_request_is_denied_and_does_not_end_the_handler():
    with zmq.Context() as context:
        handler = authenticator(context)
        handler.allow("d", {})
        with context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect("inproc://zeromq.zap.01")
            for request in ([b""], [b"1.0"] * 3, [b"1.0", b"7", b"d", b"a", b"", b"NULL"], [b"x"] * 7):
                socket.send_multipart(request)
                assert socket.poll(10_000)
                assert socket.recv_multipart()[2] == b"400"
        assert handler.denied("d") == 1
        handler.close()


def test_a_context_can_end_while_its_handler_runs():
    context = zmq.Context()
    handler = authenticator(context)
    context.term()
    handler._thread.join(20)
    assert not handler._thread.is_alive()


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]


def _allocated() -> int:
    """Bytes that the C library has lent out (`uordblks`), in all threads."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("another C library than glibc 2.33 or later")
    libc.mallinfo2.restype = _Mallinfo2
    return int(libc.mallinfo2().field7)


def _until(condition, what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)


@pytest.fixture
def quick_renewal(monkeypatch):
    monkeypatch.setattr(security, "_RENEW_AFTER", 8)
    monkeypatch.setattr(security, "_RETIRE_S", 0.2)


@pytest.fixture
def server(run_dir):
    """A handler, a hub's socket, and what connects to it: an agent, or whoever has the keys given."""
    agent, own = load_client(run_dir, 1, "agent"), KeyPair.generate()
    here = HostAndPort("127.0.0.1", 0)
    with zmq.Context() as context, contextlib.ExitStack() as opened:
        handler = authenticator(context)
        opened.callback(handler.close)
        hub = HubSocket(here, run_id="r1", keys=own, roles=role_keys(run_dir, 1), context=context)
        opened.enter_context(hub)

        def connect(keys: KeyPair = agent) -> HubLink:
            link = HubLink(hub.address, hub_key=own.public, keys=keys, run_id="r1", context=context)
            return opened.enter_context(link)

        yield handler, hub, connect


def _is_up(link: HubLink) -> None:
    _until(lambda: "up" in [event.kind for event in link.events()], "an agent is let in")


def test_all_are_admitted_while_one_handler_takes_over_from_the_other(quick_renewal, server):
    handler, hub, connect = server
    first = handler._socket
    links = [connect() for _ in range(40)]  # at once: some ask the old socket while the new one is there
    for link in links:
        _is_up(link)
    _until(lambda: handler._retired is None, "the old handler is closed")
    assert first.closed and not handler._socket.closed and hub.denied == 0
    _is_up(connect())
    for link in links:
        assert link.send(Heartbeat(seq=1))
    heard: list[str] = []
    _until(lambda: heard.extend(each.role for each in hub.drain()) or len(heard) >= 40, "connections stay")
    assert heard == ["agent"] * 40


def test_a_handler_goes_on_where_no_other_socket_can_be_had(quick_renewal, server, monkeypatch):
    handler, _, connect = server
    first, refused = handler._socket, threading.Event()

    def no_socket():
        refused.set()
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(handler, "_new_socket", no_socket)
        for _ in range(9):
            _is_up(connect())
        assert refused.wait(20) and handler._socket is first
    for _ in range(9):
        _is_up(connect())
    _until(lambda: handler._socket is not first, "another handler")


def test_a_stranger_is_denied_by_each_handler_and_counted(quick_renewal, server):
    handler, hub, connect = server
    before = handler._socket
    for _ in range(8):
        _is_up(connect())
    _until(lambda: handler._socket is not before, "another handler")
    stranger = connect(KeyPair.generate())
    _until(lambda: "wrong_key" in [event.kind for event in stranger.events()], "a stranger is told so")
    assert hub.denied >= 1


def test_a_connection_that_is_admitted_keeps_no_queues_to_the_handler(monkeypatch, server):
    handler, _, connect = server
    monkeypatch.setattr(security, "_RENEW_AFTER", 65)
    monkeypatch.setattr(security, "_RETIRE_S", 0.2)
    for _ in range(64):
        _is_up(connect())
    before, old = _allocated(), handler._socket
    _is_up(connect())
    _until(lambda: old.closed, "the old handler is closed")
    _until(lambda: before - _allocated() > 64 * 30_000 - 500_000, "its queues are freed")


def test_a_context_can_end_while_its_handler_is_replaced(monkeypatch):
    monkeypatch.setattr(security, "_RENEW_AFTER", 1)
    monkeypatch.setattr(security, "_RETIRE_S", 60.0)
    context = zmq.Context()
    handler = authenticator(context)
    socket = context.socket(zmq.REQ)
    socket.linger = 0
    socket.connect("inproc://zeromq.zap.01")
    socket.send_multipart([b"x"] * 7)
    _until(lambda: handler._retired is not None, "another handler")
    socket.close()
    context.term()
    handler._thread.join(20)
    assert not handler._thread.is_alive()


def test_without_its_handler_a_server_admits_nobody(run_dir):
    keys = KeyPair.generate()
    with zmq.Context() as context:
        handler = authenticator(context)
        with HubSocket(
            HostAndPort("127.0.0.1", 0), run_id="r1", keys=keys, roles=role_keys(run_dir, 1), context=context
        ) as hub:
            handler.close()
            agent = load_client(run_dir, 1, "agent")
            with HubLink(hub.address, hub_key=keys.public, keys=agent, run_id="r1") as link:
                assert link.monitor.poll(20_000)
                assert "up" not in [event.kind for event in link.events()]


def test_the_key_that_sglang_parses_as_an_argument_is_never_taken_for_a_flag(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "-" * size)
    create_secrets(tmp_path, 0)
    assert set(load_http_key(tmp_path, 0)) <= set("0123456789abcdef")
    assert len(load_http_key(tmp_path, 0)) == 64
