"""The rules of a call, driven by plain values: no socket, no clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.wire.codec import DECODE_FAILURES
from miles_hpc.wire.rpc_client_calls import ACKNOWLEDGE_FROM, LARGE_ANSWER, ClientCalls
from miles_hpc.wire.rpc_messages import (
    RPC_PROTOCOL,
    Answers,
    Call,
    Calls,
    Failure,
    Hello,
    HelloAnswer,
    Result,
    decode_to_client,
    decode_to_server,
    encode,
)
from miles_hpc.wire.rpc_protocol import MOST_IN_ONE, RpcError, RpcRemoteError, RpcUnknownOutcome, RpcUnreachable
from miles_hpc.wire.rpc_server_calls import (
    GONE_AFTER_S,
    KEPT_ANSWERS,
    KEPT_CLIENTS,
    Answer,
    ServerCalls,
    failure,
    result,
)

pytestmark = pytest.mark.unit


NIL = msgspec.Raw(b"\xc0")


class Client:
    """ClientCalls with everything that it sent and every outcome."""

    def __init__(self, name=b"c"):
        self.sent, self.outcomes = [], {}
        self.calls = ClientCalls(name, self.sent.append)

    def begin(self, buffers=(), **how):
        call = self.calls.begin(
            "m", None, list(buffers), lambda outcome: self.outcomes.setdefault(call, outcome), **how
        )
        return call

    def up(self, incarnation=b"s1"):
        self.calls.on_up()
        assert self.take() == [Hello(RPC_PROTOCOL, b"c")]
        self.calls.on_frames([encode(HelloAnswer(RPC_PROTOCOL, incarnation))])

    def take(self):
        """What was sent, with what waited to be."""
        self.calls.flush()
        sent = [decode_to_server.decode(frames[0]) for frames in self.sent]
        self.sent.clear()
        return sent

    def take_calls(self):
        return [call.call for message in self.take() for call in message.calls]

    def result(self, call, value=None):
        self.calls.on_frames([encode(Answers([Result(call, msgspec.Raw(encode(value)))]))])


class Server:
    def __init__(self):
        self.sent, self.now = [], 0.0
        self.calls = ServerCalls(b"s1", lambda route, frames: self.sent.append((route, frames)), lambda: self.now)

    def call(self, call, oldest=1, client=b"c", route=b"r1"):
        """The request that a call makes, if any."""
        requests = self.calls.on_frames(route, [encode(Calls(client, oldest, [Call(call, "m", NIL)]))])
        assert len(requests) < 2
        return requests[0] if requests else None

    def done(self, request, value=None):
        self.calls.on_done(request, result(request, value))

    def acknowledge(self, oldest, done=(), client=b"c"):
        assert self.calls.on_frames(b"r1", [encode(Calls(client, oldest, [], list(done)))]) == []

    def take(self):
        """(route, answer) of what was sent, with what waited to be."""
        self.calls.flush()
        sent = []
        for route, frames in self.sent:
            message = decode_to_client.decode(frames[0])
            sent += [(route, answer) for answer in getattr(message, "answers", [message])]
        self.sent.clear()
        return sent


# ------------------------------------------------------------------------------------------ the wire
def test_both_ends_send_their_golden_bytes():
    """A deliberate change of these needs another RPC_PROTOCOL."""
    client, server = Client(), Server()
    client.calls.on_up()
    (hello,) = client.sent.pop()
    server.calls.on_frames(b"r1", [hello])
    (hello_answer,) = server.sent.pop()[1]
    client.calls.on_frames([hello_answer])
    client.begin()
    client.begin([b"x", b"y"])
    client.calls.flush()
    calls, *_ = sent = client.sent.pop()
    first, second = server.calls.on_frames(b"r1", sent)
    server.done(second, ("v", [b"z"]))
    server.calls.on_done(first, failure(first, "KeyError", "k", "t"))
    server.calls.flush()
    answers, *_ = sent = server.sent.pop()[1]
    client.calls.on_frames(sent)
    client.calls.flush(acknowledge=True)
    assert [hello, hello_answer, calls, answers, client.sent.pop()[0]] == [
        b"\x93\xa5Hello\x02\xc4\x01c",
        b"\x93\xabHelloAnswer\x02\xc4\x02s1",
        b"\x95\xa5Calls\xc4\x01c\x01\x92\x94\x01\xa1m\xc0\x00\x94\x02\xa1m\xc0\x02\x90",
        b"\x92\xa7Answers\x92\x94\xa6Result\x02\xa1v\x01\x95\xa7Failure\x01\xa8KeyError\xa1k\xa1t",
        b"\x95\xa5Calls\xc4\x01c\x03\x90\x90",
    ]


# ------------------------------------------------------------------------------------------ client
def test_nothing_is_sent_before_the_server_has_said_who_it_is():
    client = Client()
    call = client.begin()
    assert client.take() == []
    client.calls.on_up()
    assert client.take() == [Hello(RPC_PROTOCOL, b"c")]
    client.calls.on_frames([encode(HelloAnswer(RPC_PROTOCOL, b"s1"))])
    assert client.take() == [Calls(b"c", call, [Call(call, "m", NIL)])]


def test_an_answer_ends_its_call_and_is_acknowledged_with_the_next_one():
    client = Client()
    client.up()
    first, second = client.begin(), client.begin()
    client.take()
    client.result(second, {"a": 1})
    assert client.outcomes[second].value == {"a": 1}
    assert first not in client.outcomes
    assert client.take() == []
    third = client.begin()
    (sent,) = client.take()
    assert (sent.oldest, sent.done, [call.call for call in sent.calls]) == (first, [second], [third])
    client.result(first)
    fourth = client.begin()
    (sent,) = client.take()
    assert (sent.oldest, sent.done, [call.call for call in sent.calls]) == (third, [], [fourth])
    client.result(third)
    client.result(fourth)
    assert len(client.calls) == 0


def test_what_is_begun_together_leaves_together():
    client = Client()
    client.up()
    begun = [client.begin() for _ in range(MOST_IN_ONE + 2)]
    sent = client.take()
    assert [len(message.calls) for message in sent] == [MOST_IN_ONE, 2]
    assert [call.call for message in sent for call in message.calls] == begun
    assert client.take() == []


def test_each_call_of_a_message_has_its_own_buffers():
    client, server = Client(), Server()
    client.up()
    client.begin([b"a", b"b"])
    client.begin()
    client.begin([b"c"])
    client.calls.flush()
    (frames,) = client.sent
    requests = server.calls.on_frames(b"r1", frames)
    assert [[bytes(frame) for frame in request.frames] for request in requests] == [[b"a", b"b"], [], [b"c"]]
    for request in reversed(requests):
        server.done(request, (len(request.frames), [bytes(frame) * 2 for frame in request.frames]))
    server.calls.flush()
    ((_, answer),) = server.sent
    client.calls.on_frames(answer)
    found = {call: [bytes(frame) for frame in outcome.frames] for call, outcome in client.outcomes.items()}
    assert found == {1: [b"aa", b"bb"], 2: [], 3: [b"cc"]}


def test_buffers_that_are_missing_make_a_message_none_of_ours():
    with pytest.raises(IndexError, match="0 buffers came, 1 were announced"):
        Server().calls.on_frames(b"r1", [encode(Calls(b"c", 1, [Call(1, "m", NIL, 1)]))])


def test_of_a_message_without_all_its_buffers_no_call_is_taken_for_running():
    server = Server()
    calls = encode(Calls(b"c", 1, [Call(1, "m", NIL), Call(2, "m", NIL, 1), Call(3, "m", NIL, 1)]))
    with pytest.raises(IndexError, match="1 buffers came, 2 were announced"):
        server.calls.on_frames(b"r1", [calls, b"a"])
    found = server.calls.on_frames(b"r1", [calls, b"a", b"b"])
    assert [(request.call, [bytes(frame) for frame in request.frames]) for request in found] == [
        (1, []),
        (2, [b"a"]),
        (3, [b"b"]),
    ]


def test_a_call_is_sent_as_it_was_begun_whatever_becomes_of_its_parameters():
    client, params = Client(), [1]
    client.up()
    client.calls.begin("m", params, [], lambda outcome: None)
    params.append(2)
    ((call,),) = [message.calls for message in client.take()]
    assert msgspec.msgpack.decode(call.params) == [1]


def test_a_large_answer_is_acknowledged_at_once_and_many_small_ones_are():
    client = Client()
    client.up()
    calls = [client.begin() for _ in range(ACKNOWLEDGE_FROM + 3)]
    client.take()
    client.result(calls[-1], b"x" * LARGE_ANSWER)
    assert client.take() == [Calls(b"c", calls[0], [], [calls[-1]])]
    for call in calls[1:-1]:
        client.result(call)
    assert client.take() == [Calls(b"c", calls[0], [], calls[1 : ACKNOWLEDGE_FROM + 1])]
    client.calls.flush(acknowledge=True)
    assert client.take() == [Calls(b"c", calls[0], [], calls[ACKNOWLEDGE_FROM + 1 : -1])]
    client.calls.flush(acknowledge=True)
    assert client.take() == []


def test_open_calls_are_repeated_to_the_same_server_after_a_reconnect():
    client = Client()
    client.up()
    first, second = client.begin(), client.begin()
    client.take()
    client.calls.on_down()
    third = client.begin()
    assert client.take() == []
    client.up()
    assert client.take_calls() == [first, second, third]
    assert client.outcomes == {}


def test_calls_that_another_server_got_are_not_repeated_and_those_it_did_not_get_are_sent():
    client = Client()
    client.up(b"s1")
    old = client.begin()
    client.take()
    client.calls.on_down()
    new = client.begin()
    client.up(b"s2")
    assert client.take_calls() == [new]
    assert isinstance(client.outcomes[old].error, RpcUnknownOutcome)
    assert new not in client.outcomes


def test_an_idempotent_call_is_repeated_to_another_server():
    client = Client()
    client.up(b"s1")
    call = client.begin(idempotent=True)
    client.calls.on_down()
    client.take()
    client.up(b"s2")
    assert client.take_calls() == [call]
    assert client.outcomes == {}


def test_a_failure_carries_type_text_and_traceback():
    client = Client()
    client.up()
    call = client.begin()
    client.calls.on_frames([encode(Answers([Failure(call, "KeyError", "'x'", "Traceback …")]))])
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
    client.calls.flush(acknowledge=True)
    assert client.take() == [Calls(b"c", call + 1)]


def test_an_abandoned_call_is_not_repeated():
    client = Client()
    client.up()
    client.calls.abandon(client.begin())
    client.calls.on_down()
    client.take()
    client.up()
    assert client.take_calls() == []


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
    client.calls.on_frames([encode(Answers([Result(call, msgspec.Raw(b"\xd4\xff\x00"))]))])
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
    assert server.calls.on_frames(b"r1", [encode(Hello(RPC_PROTOCOL, b"c"))]) == []
    assert server.take() == [(b"r1", HelloAnswer(RPC_PROTOCOL, b"s1"))]


def test_a_repeat_of_a_running_call_is_not_run_and_its_answer_goes_to_the_newest_route():
    server = Server()
    request = server.call(1)
    assert server.call(1, route=b"r2") is None
    assert server.take() == []
    server.done(request)
    assert server.take() == [(b"r2", Result(1, NIL))]


def test_a_repeat_of_an_answered_call_gets_the_kept_answer():
    server = Server()
    server.done(server.call(1))
    server.take()
    assert server.call(1, route=b"r2") is None
    assert server.take() == [(b"r2", Result(1, NIL))]


def test_a_repeat_of_an_acknowledged_call_is_not_run():
    server = Server()
    server.done(server.call(1))
    server.acknowledge(oldest=2)
    server.take()
    assert server.call(1) is None
    assert server.take() == []


def test_a_call_that_was_acknowledged_out_of_order_is_forgotten_alone():
    server = Server()
    for call in (1, 2, 3):
        server.done(server.call(call))
    server.acknowledge(oldest=1, done=[2])
    assert list(server.calls._clients[b"c"].answers) == [1, 3]


def test_parameters_that_do_not_decode_fail_their_call_and_no_other():
    server = Server()
    bad = Call(1, "m", msgspec.Raw(b"\xd6\xff\xff\xff\xff\xff"))
    timestamp = Call(2, "m", msgspec.Raw(b"\xc7\x0c\xff\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff"))
    requests = server.calls.on_frames(b"r1", [encode(Calls(b"c", 1, [bad, timestamp, Call(3, "m", NIL)]))])
    assert [request.call for request in requests][-1] == 3
    failed = [answer for _, answer in server.take()]
    assert {answer.type_name for answer in failed} == {"DecodeError"}
    assert 2 in {answer.call for answer in failed}


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


def many_clients(server, count=KEPT_CLIENTS + 5):
    """Clients that make a call each, and acknowledge its answer."""
    for index in range(count):
        name = f"c{index}".encode()
        server.done(server.call(1, client=name))
        server.acknowledge(oldest=2, client=name)
    server.take()


def test_clients_with_nothing_open_are_bounded_and_the_longest_silent_are_forgotten_first():
    server = Server()
    many_clients(server, KEPT_CLIENTS)
    server.acknowledge(oldest=2, client=b"c0")
    for name in (b"new1", b"new2"):
        assert server.call(1, client=name) is not None
    assert len(server.calls._clients) == KEPT_CLIENTS
    assert [name for name in (b"c0", b"c1", b"c2", b"c3") if name not in server.calls._clients] == [b"c1", b"c2"]


def test_a_client_with_a_running_call_is_never_forgotten():
    server = Server()
    busy = server.call(1, client=b"busy")
    many_clients(server)
    assert len(server.calls._clients) == KEPT_CLIENTS
    assert server.call(1, client=b"busy", route=b"r2") is None
    server.done(busy)
    assert server.take() == [(b"r2", Result(1, NIL))]


def test_a_client_with_an_answer_that_it_has_not_acknowledged_is_never_forgotten():
    server = Server()
    server.done(server.call(1, client=b"quiet"), 7)
    many_clients(server)
    assert server.call(1, client=b"quiet", route=b"r2") is None
    assert server.take() == [(b"r2", Result(1, msgspec.Raw(encode(7))))]
    server.acknowledge(oldest=2, client=b"quiet")
    many_clients(server)
    assert b"quiet" not in server.calls._clients


def test_a_client_whose_answers_were_given_up_is_never_forgotten():
    server = Server()
    for call in range(1, KEPT_ANSWERS + 2):
        server.done(server.call(call, client=b"quiet"))
    server.acknowledge(oldest=1, done=range(2, KEPT_ANSWERS + 2), client=b"quiet")
    many_clients(server)
    assert server.call(1, client=b"quiet") is None
    ((_, answer),) = server.take()
    assert answer.type_name == "AnswerGivenUp"


def test_a_client_that_ended_without_its_last_acknowledgement_is_forgotten_in_the_end_and_a_running_call_never():
    server = Server()
    busy = server.call(1, client=b"busy")
    server.done(server.call(1, client=b"ended"))
    server.now = GONE_AFTER_S - 1
    many_clients(server)
    assert b"ended" in server.calls._clients
    server.now = GONE_AFTER_S
    many_clients(server)
    assert b"ended" not in server.calls._clients and b"busy" in server.calls._clients
    assert len(server.calls._clients) == KEPT_CLIENTS and busy is not None


def test_clients_that_all_have_something_open_are_all_kept_and_shrink_again_when_they_have_not():
    server = Server()
    names = [f"o{index}".encode() for index in range(KEPT_CLIENTS + 7)]
    requests = [server.call(1, client=name) for name in names]
    assert len(server.calls._clients) == len(names)
    assert [name for name in names if server.call(1, client=name) is not None] == []
    for request in requests:
        server.done(request)
    assert [name for name in names if server.call(1, client=name) is not None] == []
    for name in names:
        server.acknowledge(oldest=2, client=name)
    assert server.call(1, client=b"new") is not None
    assert len(server.calls._clients) == KEPT_CLIENTS


@pytest.mark.parametrize("value", [None, 1, "a", {"k": [1, 2]}, (1, 2), (1, [2]), (1, 2, 3), [], ()], ids=repr)
def test_a_value_without_buffers_is_sent_as_a_value(value):
    answer = result(Server().call(1), value)
    assert (bytes(answer.header.value), answer.buffers) == (msgspec.msgpack.encode(value), [])


def test_a_value_with_buffers_is_sent_with_them():
    answer = result(Server().call(1), ({"a": 1}, [b"x", bytearray(b"y"), memoryview(b"z")]))
    assert msgspec.msgpack.decode(answer.header.value) == {"a": 1}
    assert [bytes(frame) for frame in answer.buffers] == [b"x", b"y", b"z"]


def test_a_value_that_is_not_msgpack_is_a_type_error():
    with pytest.raises(TypeError):
        result(Server().call(1), object())


GAPS = memoryview(b"abcd")[::2]


def test_buffers_with_gaps_fail_their_own_call_and_no_other():
    server = Server()
    good, bad = server.call(1), server.call(2)
    server.done(good)
    with pytest.raises((TypeError, BufferError)):
        server.done(bad, ("value", [GAPS]))
    assert server.take() == [(b"r1", Result(1, NIL))]


@pytest.mark.parametrize("buffer", [GAPS, "text"], ids=["gaps", "text"])
def test_a_call_with_what_is_no_buffer_or_has_gaps_is_not_begun(buffer):
    client = Client()
    with pytest.raises(TypeError, match="contiguous buffers"):
        client.begin([buffer])
    assert len(client.calls) == 0


# ------------------------------------------------------------------------------------------ both, and what breaks
@given(st.lists(st.sampled_from(["begin", "down", "up", "deliver", "finish", "back", "turn"]), max_size=60))
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
            for request in server.on_frames(b"r", wire_to.pop(0)):
                runs.append(request.call)
                running.append(request)
        elif event == "finish" and running:
            request = running.pop(0)
            server.on_done(request, result(request, request.call))
        elif event == "turn":
            client.calls.flush()
            server.flush()
        elif event == "back" and wire_back and linked:
            client.calls.on_frames(wire_back.pop(0))

    for event in events:
        step(event)
    step("up")
    for _ in range(20 * (len(events) + 1)):
        for event in ("turn", "deliver", "finish", "turn", "back"):
            step(event)
    client.calls.flush(acknowledge=True)
    step("deliver")
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


def test_a_failure_says_what_happened():
    answer = failure(Server().call(3), "ValueError", "text", "trace")
    assert answer == Answer(Failure(3, "ValueError", "text", "trace"), [])
