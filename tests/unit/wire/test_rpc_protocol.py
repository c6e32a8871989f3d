"""The rules of a call, driven by plain values: no socket, no clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.wire import rpc_protocol as rpc
from miles_hpc.wire.codec import DECODE_FAILURES
from miles_hpc.wire.rpc_protocol import (
    KEPT_ANSWERS,
    KEPT_CLIENTS,
    Acknowledge,
    Call,
    ClientCalls,
    Failure,
    Hello,
    HelloAnswer,
    RpcError,
    RpcRemoteError,
    RpcUnknownOutcome,
    RpcUnreachable,
    ServerCalls,
    decode_to_client,
    decode_to_server,
    encode,
    failure_frames,
    result_frames,
)

pytestmark = pytest.mark.unit


class Client:
    """ClientCalls with everything that it sent and every outcome."""

    def __init__(self, name=b"c"):
        self.sent, self.outcomes = [], {}
        self.calls = ClientCalls(name, self.sent.append)

    def begin(self, **how):
        call = self.calls.begin("m", [b"\xc0"], lambda outcome: self.outcomes.setdefault(call, outcome), **how)
        return call

    def up(self, incarnation=b"s1"):
        self.calls.on_up()
        self.take()
        self.calls.on_frames([encode(HelloAnswer(rpc.RPC_PROTOCOL, incarnation))])

    def take(self):
        sent = [decode_to_server.decode(frames[0]) for frames in self.sent]
        self.sent.clear()
        return sent

    def result(self, call, value=None):
        self.calls.on_frames([encode(rpc.Result(call)), encode(value)])


class Server:
    def __init__(self):
        self.sent = []
        self.calls = ServerCalls(b"s1", lambda route, frames: self.sent.append((route, frames)))

    def call(self, call, oldest=1, client=b"c", route=b"r1"):
        return self.calls.on_frames(route, [encode(Call(client, call, oldest, "m")), b"\xc0"])

    def done(self, request, value=None):
        self.calls.on_done(request, result_frames(request, value))

    def acknowledge(self, call, oldest, client=b"c"):
        assert self.calls.on_frames(b"r1", [encode(Acknowledge(client, call, oldest))]) is None

    def take(self):
        sent = [(route, decode_to_client.decode(frames[0])) for route, frames in self.sent]
        self.sent.clear()
        return sent


# ------------------------------------------------------------------------------------------ client
def test_nothing_is_sent_before_the_server_has_said_who_it_is():
    client = Client()
    call = client.begin()
    assert client.take() == []
    client.calls.on_up()
    assert client.take() == [Hello(rpc.RPC_PROTOCOL, b"c")]
    client.calls.on_frames([encode(HelloAnswer(rpc.RPC_PROTOCOL, b"s1"))])
    assert client.take() == [Call(b"c", call, call, "m")]


def test_an_answer_ends_its_call_and_is_acknowledged():
    client = Client()
    client.up()
    first, second = client.begin(), client.begin()
    client.take()
    client.result(second, {"a": 1})
    assert client.outcomes[second].value == {"a": 1}
    assert first not in client.outcomes
    assert client.take() == [Acknowledge(b"c", second, first)]
    client.result(first)
    assert client.take() == [Acknowledge(b"c", first, second + 1)]
    assert len(client.calls) == 0


def test_open_calls_are_repeated_to_the_same_server_after_a_reconnect():
    client = Client()
    client.up()
    first, second = client.begin(), client.begin()
    client.take()
    client.calls.on_down()
    third = client.begin()
    assert client.take() == []
    client.up()
    assert [message.call for message in client.take()] == [first, second, third]
    assert client.outcomes == {}


def test_calls_that_another_server_got_are_not_repeated_and_those_it_did_not_get_are_sent():
    client = Client()
    client.up(b"s1")
    old = client.begin()
    client.calls.on_down()
    new = client.begin()
    client.take()
    client.up(b"s2")
    assert [message.call for message in client.take()] == [new]
    assert isinstance(client.outcomes[old].error, RpcUnknownOutcome)
    assert new not in client.outcomes


def test_an_idempotent_call_is_repeated_to_another_server():
    client = Client()
    client.up(b"s1")
    call = client.begin(idempotent=True)
    client.calls.on_down()
    client.take()
    client.up(b"s2")
    assert [message.call for message in client.take()] == [call]
    assert client.outcomes == {}


def test_a_failure_carries_type_text_and_traceback():
    client = Client()
    client.up()
    call = client.begin()
    client.calls.on_frames([encode(Failure(call, "KeyError", "'x'", "Traceback …"))])
    error = client.outcomes[call].error
    assert isinstance(error, RpcRemoteError)
    assert (error.type_name, error.text, error.traceback) == ("KeyError", "'x'", "Traceback …")
    assert str(error) == "KeyError: 'x'"


def test_a_late_answer_of_an_abandoned_call_is_acknowledged_and_goes_nowhere():
    client = Client()
    client.up()
    call = client.begin()
    client.calls.abandon(call)
    client.take()
    client.result(call)
    assert client.outcomes == {}
    assert client.take() == [Acknowledge(b"c", call, call + 1)]


def test_an_abandoned_call_is_not_repeated():
    client = Client()
    client.up()
    client.calls.abandon(client.begin())
    client.calls.on_down()
    client.take()
    client.up()
    assert client.take() == []


def test_a_repeated_answer_is_given_once():
    client = Client()
    client.up()
    call = client.begin()
    client.result(call, 1)
    client.result(call, 2)
    assert client.outcomes[call].value == 1


def test_a_value_that_does_not_decode_ends_the_call_with_an_error():
    client = Client()
    client.up()
    call = client.begin()
    client.calls.on_frames([encode(rpc.Result(call)), b"\xc1"])
    assert isinstance(client.outcomes[call].error, RpcError)


def test_a_server_of_another_protocol_fails_all_calls_by_name():
    client = Client()
    call = client.begin()
    client.calls.on_up()
    client.calls.on_frames([encode(HelloAnswer(99, b"s1"))])
    assert isinstance(client.outcomes[call].error, RpcUnreachable)
    assert "RPC protocol 99" in str(client.outcomes[call].error)


# ------------------------------------------------------------------------------------------ server
def test_a_hello_is_answered_with_the_incarnation():
    server = Server()
    assert server.calls.on_frames(b"r1", [encode(Hello(rpc.RPC_PROTOCOL, b"c"))]) is None
    assert server.take() == [(b"r1", HelloAnswer(rpc.RPC_PROTOCOL, b"s1"))]


def test_a_repeat_of_a_running_call_is_not_run_and_its_answer_goes_to_the_newest_route():
    server = Server()
    request = server.call(1)
    assert server.call(1, route=b"r2") is None
    assert server.take() == []
    server.done(request)
    assert server.take() == [(b"r2", rpc.Result(1))]


def test_a_repeat_of_an_answered_call_gets_the_kept_answer():
    server = Server()
    server.done(server.call(1))
    server.take()
    assert server.call(1, route=b"r2") is None
    assert server.take() == [(b"r2", rpc.Result(1))]


def test_a_repeat_of_an_acknowledged_call_is_not_run():
    server = Server()
    server.done(server.call(1))
    server.acknowledge(1, oldest=2)
    server.take()
    assert server.call(1) is None
    assert server.take() == []


def test_calls_of_different_clients_do_not_meet():
    server = Server()
    assert server.call(1, client=b"a") is not None
    assert server.call(1, client=b"b") is not None


def test_an_answer_of_a_call_that_the_client_gave_up_is_not_kept():
    server = Server()
    request = server.call(1)
    server.call(2, oldest=2)
    server.done(request)
    assert server.calls._clients[b"c"].answers == {}


def test_unacknowledged_answers_are_bounded_and_what_is_given_up_is_never_run_again():
    server = Server()
    for call in range(1, KEPT_ANSWERS + 3):
        server.done(server.call(call))
    assert len(server.calls._clients[b"c"].answers) == KEPT_ANSWERS
    server.take()
    assert server.call(1) is None
    ((_, answer),) = server.take()
    assert isinstance(answer, Failure)
    assert answer.type_name == "AnswerGivenUp"


def test_clients_are_bounded_and_those_with_a_running_call_are_kept():
    server = Server()
    busy = server.call(1, client=b"busy")
    for index in range(KEPT_CLIENTS + 5):
        server.done(server.call(1, client=f"c{index}".encode()))
    assert len(server.calls._clients) == KEPT_CLIENTS
    server.take()
    assert server.call(1, client=b"busy") is None
    server.done(busy)
    assert server.take() == [(b"r1", rpc.Result(1))]


@pytest.mark.parametrize("value", [None, 1, "a", {"k": [1, 2]}, (1, 2), (1, [2]), (1, 2, 3), [], ()], ids=repr)
def test_a_value_without_buffers_is_sent_as_a_value(value):
    frames = result_frames(Server().call(1), value)
    assert frames[1:] == [msgspec.msgpack.encode(value)]


def test_a_value_with_buffers_is_sent_with_them():
    frames = result_frames(Server().call(1), ({"a": 1}, [b"x", bytearray(b"y"), memoryview(b"z")]))
    assert msgspec.msgpack.decode(frames[1]) == {"a": 1}
    assert [bytes(frame) for frame in frames[2:]] == [b"x", b"y", b"z"]


def test_a_value_that_is_not_msgpack_is_a_type_error():
    with pytest.raises(TypeError):
        result_frames(Server().call(1), object())


# ------------------------------------------------------------------------------------------ both, and what breaks
@given(st.lists(st.sampled_from(["begin", "down", "up", "deliver", "finish", "back"]), max_size=60))
@settings(deadline=None)
def test_no_call_runs_twice_and_each_ends_whatever_is_lost(events):
    """A connection that loses what is under way at each break; afterwards all is delivered."""
    runs, running, wire_to, wire_back = [], [], [], []
    client = Client()
    client.calls._send = wire_to.append
    server = ServerCalls(b"s1", lambda route, frames: wire_back.append(frames))
    begun, linked = [], False

    def step(event):
        nonlocal linked
        if event == "begin":
            begun.append(client.begin())
        elif event == "down":
            linked = False
            client.calls.on_down()
            wire_to.clear()
            wire_back.clear()
        elif event == "up" and not linked:
            linked = True
            client.calls.on_up()
        elif event == "deliver" and wire_to and linked:
            request = server.on_frames(b"r", wire_to.pop(0))
            if request is not None:
                runs.append(request.call)
                running.append(request)
        elif event == "finish" and running:
            request = running.pop(0)
            server.on_done(request, result_frames(request, request.call))
        elif event == "back" and wire_back and linked:
            client.calls.on_frames(wire_back.pop(0))

    for event in events:
        step(event)
    step("up")
    for _ in range(20 * (len(events) + 1)):
        for event in ("deliver", "finish", "back"):
            step(event)
    assert sorted(runs) == begun
    assert {call: outcome.value for call, outcome in client.outcomes.items()} == {call: call for call in begun}
    assert not server._clients or not server._clients[b"c"].answers


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_random_frames_raise_nothing_but_decode_failures(frames):
    for take in (lambda: Server().calls.on_frames(b"r", frames), lambda: Client().calls.on_frames(frames)):
        try:
            take()
        except (*DECODE_FAILURES, IndexError):
            pass


def test_failure_frames_say_what_happened():
    frames = failure_frames(Server().call(3), "ValueError", "text", "trace")
    assert decode_to_client.decode(frames[0]) == Failure(3, "ValueError", "text", "trace")
