"""The rules of a call, without I/O: what a client sends when, and what a server runs.

Frames of a message: one of the structs below, as a msgpack array, then any number of raw buffers: those of its first
call or answer, of its second, and so on. What is begun, or done, in one turn of a loop leaves as one message.

- A client says Hello after each connect; the server answers with its incarnation. Calls go out only then.
- (client, call) names a call. A repeated one is never run twice by a server: it is still running, or its answer is kept
  until the client acknowledges it.
- After a reconnect to the same incarnation a client repeats its open calls; to another incarnation only those that
  their callers call idempotent: whether the last one ran them is unknown, and the other callers are told so.
- `oldest` and `done` acknowledge: the server forgets every lower call of that client, and those. They travel with the
  client's next calls, or by themselves when many or large answers are held up by them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from miles_hpc.wire.codec import DECODE_FAILURES, Buffer

RPC_PROTOCOL = 2
KEPT_ANSWERS = 256
"""Unacknowledged answers kept per client; older ones are given up and a repeat of their call is told so."""
KEPT_CLIENTS = 1024
"""Clients remembered. Beyond that the longest silent ones are forgotten that have nothing open: a client with a running
call, or one that it has not acknowledged, may repeat it after a reconnect, and only who knows it does not run it twice.
So the table grows by the clients that have something open."""
ACKNOWLEDGE_FROM = 64
"""Answers that wait for their acknowledgement before it is sent without a call."""
LARGE_ANSWER = 16 * 1024
"""Bytes of an answer that is acknowledged at once, so that the server need not hold it."""
MOST_IN_ONE = 128
"""Calls or answers in one message."""


class RpcError(Exception):
    """A call did not give a result."""


class RpcTimeout(RpcError):
    """The server has the call but did not answer in time; it may still run it."""


class RpcUnreachable(RpcError):
    """No server could be reached in time."""


class RpcUnknownOutcome(RpcUnreachable):
    """The server that got the call is gone; whether it ran it is unknown. Repeat it only if it is idempotent."""


class RpcRemoteError(RpcError):
    """The handler raised. `type_name`, `text` and `traceback` are those of the exception over there."""

    def __init__(self, type_name: str, text: str, traceback: str) -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.traceback = traceback


class _Header(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Hello(_Header, frozen=True):
    protocol: int
    client: bytes


class HelloAnswer(_Header, frozen=True):
    protocol: int
    incarnation: bytes


class Call(msgspec.Struct, frozen=True, array_like=True):
    """`params` as msgpack; `buffers` of the message's frames are its own."""

    call: int
    method: str
    params: msgspec.Raw
    buffers: int = 0


class Calls(_Header, frozen=True):
    client: bytes
    oldest: int
    calls: list[Call] = []
    done: list[int] = []


class Result(_Header, frozen=True):
    """`value` as msgpack; `buffers` of the message's frames are its own."""

    call: int
    value: msgspec.Raw
    buffers: int = 0


class Failure(_Header, frozen=True):
    call: int
    type_name: str
    text: str
    traceback: str = ""


class Answers(_Header, frozen=True):
    answers: list[Result | Failure]


Frames: TypeAlias = "list[Buffer]"

encode = msgspec.msgpack.Encoder().encode
decode_value: Callable[[Buffer], Any] = msgspec.msgpack.Decoder().decode
decode_to_server: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Hello | Calls)
decode_to_client: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HelloAnswer | Answers)


# ---------------------------------------------------------------------------------------------- client
class Outcome(NamedTuple):
    """How a call ended: `error`, or a value with its buffers."""

    value: Any
    frames: list[memoryview]
    error: RpcError | None


class _Open:
    __slots__ = ("buffers", "done", "header", "idempotent", "sent_to")

    def __init__(self, header: Call, buffers: Frames, done: Callable[[Outcome], None], idempotent: bool) -> None:
        self.header = header
        self.buffers = buffers
        self.done = done
        self.idempotent = idempotent
        self.sent_to = b""


class ClientCalls:
    """Open calls of one client.

    Args:
        client: random name of this client.
        send: hands frames to the socket; they may be lost when the connection breaks.
    """

    def __init__(self, client: bytes, send: Callable[[Frames], None]) -> None:
        self._client = client
        self._send = send
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._unsent: list[int] = []
        """Begun since the last `flush` of this connection."""
        self._done: list[int] = []
        """Answered calls that the server does not know to be done."""
        self._next = 1
        self._server = b""
        """Incarnation that the current connection leads to; empty before its hello was answered."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def linked(self) -> bool:
        """Whether calls go out with the next `flush`."""
        return bool(self._server)

    def was_sent(self, call: int) -> bool:
        """Whether an open call was handed to some server."""
        return call in self._open and bool(self._open[call].sent_to)

    def begin(
        self, method: str, params: Any, buffers: Frames, done: Callable[[Outcome], None], *, idempotent: bool = False
    ) -> int:
        """Open a call, to be sent by the next `flush`. Its outcome goes to `done`, once.

        Raises:
            TypeError: when `params` are not made of msgpack types, or a buffer is none or has gaps.
        """
        if not _are_buffers(buffers):
            raise TypeError(f"the frames of call {method!r} must be contiguous buffers")
        call = self._next
        header = Call(call, method, msgspec.Raw(encode(params)), len(buffers))
        self._next += 1
        self._open[call] = _Open(header, buffers, done, idempotent)
        if self._server:
            self._unsent.append(call)
        return call

    def abandon(self, call: int) -> None:
        """Forget a call; `done` will not be called."""
        self._open.pop(call, None)

    def flush(self, *, acknowledge: bool = False) -> None:
        """Send what has been begun, and with it what is to be acknowledged; the latter alone only if asked to."""
        if not self._server or not (self._unsent or (acknowledge and self._done)):
            return
        unsent, self._unsent = self._unsent, []
        done, self._done = self._done, []
        oldest = next(iter(self._open), self._next)
        done = [call for call in done if call > oldest]
        for first in range(0, max(1, len(unsent)), MOST_IN_ONE):
            headers: list[Call] = []
            frames: Frames = [b""]
            for call in unsent[first : first + MOST_IN_ONE]:
                found = self._open.get(call)
                if found is not None:
                    found.sent_to = self._server
                    headers.append(found.header)
                    frames += found.buffers
            frames[0] = encode(Calls(self._client, oldest, headers, done))
            self._send(frames)
            done = []

    def on_up(self) -> None:
        """A connection was made."""
        self._server = b""
        self._send([encode(Hello(RPC_PROTOCOL, self._client))])

    def on_down(self) -> None:
        """The connection broke."""
        self._server = b""

    def on_frames(self, frames: Sequence[Buffer]) -> None:
        """A message came.

        Raises:
            one of codec.DECODE_FAILURES or IndexError: when it is none of ours.
        """
        message = decode_to_client.decode(frames[0])
        if isinstance(message, HelloAnswer):
            self._on_hello_answer(message)
            return
        next_buffer, large = 1, False
        for answer in message.answers:
            buffers: list[memoryview] = []
            if isinstance(answer, Result):
                for _ in range(answer.buffers):
                    buffers.append(memoryview(frames[next_buffer]))
                    next_buffer += 1
                large = large or len(memoryview(answer.value)) + sum(each.nbytes for each in buffers) >= LARGE_ANSWER
            # Acknowledged also when the caller has given up, so that the server can forget it.
            self._done.append(answer.call)
            found = self._open.pop(answer.call, None)
            if found is not None:
                found.done(_outcome(found.header.method, answer, buffers))
        if large or len(self._done) >= ACKNOWLEDGE_FROM:
            self.flush(acknowledge=True)

    def fail_all(self, error: RpcError) -> None:
        """Give every open call this outcome."""
        while self._open:
            self._open.popitem(last=False)[1].done(Outcome(None, [], error))

    def _on_hello_answer(self, message: HelloAnswer) -> None:
        if message.protocol != RPC_PROTOCOL:
            self.fail_all(
                RpcUnreachable(f"the server speaks RPC protocol {message.protocol}, this side {RPC_PROTOCOL}")
            )
            return
        self._server = message.incarnation
        for call, found in list(self._open.items()):
            if found.sent_to not in (b"", self._server) and not found.idempotent:
                del self._open[call]
                error = RpcUnknownOutcome(f"the server of call {found.header.method!r} was replaced before it answered")
                found.done(Outcome(None, [], error))
        self._unsent = list(self._open)
        self.flush()


def _outcome(method: str, answer: Result | Failure, buffers: list[memoryview]) -> Outcome:
    if isinstance(answer, Failure):
        return Outcome(None, [], RpcRemoteError(answer.type_name, answer.text, answer.traceback))
    try:
        return Outcome(decode_value(answer.value), buffers, None)
    except DECODE_FAILURES as failure:
        return Outcome(None, [], RpcError(f"the answer of {method!r} does not decode: {failure}"))


# ---------------------------------------------------------------------------------------------- server
class Request(NamedTuple):
    """A call to run."""

    client: bytes
    call: int
    method: str
    params: Any
    frames: list[memoryview]


class Answer(NamedTuple):
    """What a call gave, with its buffers."""

    header: Result | Failure
    buffers: Frames


class _Client:
    def __init__(self) -> None:
        self.route = b""
        self.oldest = 0
        self.running: set[int] = set()
        self.answers: OrderedDict[int, Answer] = OrderedDict()
        self.given_up: set[int] = set()
        self.unsent: list[Answer] = []

    @property
    def idle(self) -> bool:
        """Whether it has acknowledged all that it called."""
        return not (self.running or self.answers or self.given_up)


class ServerCalls:
    """What a server knows of its clients' calls.

    Args:
        incarnation: random name of this server object.
        send: (route, frames) hands an answer to the socket; it may be lost when the client is gone.
    """

    def __init__(self, incarnation: bytes, send: Callable[[bytes, Frames], None]) -> None:
        self._incarnation = incarnation
        self._send = send
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._with_unsent: list[_Client] = []

    def on_frames(self, route: bytes, frames: Sequence[Buffer]) -> list[Request]:
        """A message came; returns the calls that must be run now.

        Raises:
            one of codec.DECODE_FAILURES or IndexError: when it is none of ours.
        """
        message = decode_to_server.decode(frames[0])
        if isinstance(message, Hello):
            self._client(message.client).route = route
            self._send(route, [encode(HelloAnswer(RPC_PROTOCOL, self._incarnation))])
            return []
        client = self._client(message.client)
        client.route = route
        self._forget(client, message.oldest, message.done)
        requests: list[Request] = []
        next_buffer = 1
        for call in message.calls:
            following = next_buffer + call.buffers
            if following > len(frames):
                raise IndexError(f"{len(frames) - 1} buffers came, call {call.method!r} needs {following - 1}")
            buffers = [memoryview(frame) for frame in frames[next_buffer:following]]
            next_buffer = following
            request = self._on_call(client, message.client, call, buffers)
            if request is not None:
                requests.append(request)
        return requests

    def on_done(self, request: Request, answer: Answer) -> None:
        """A call has ended; `answer` of `result` or `failure` is kept, and sent by the next `flush`."""
        client = self._client(request.client)
        client.running.discard(request.call)
        self._answer(client, answer)
        if request.call < client.oldest:
            return
        client.answers[request.call] = answer
        while len(client.answers) > KEPT_ANSWERS:
            client.given_up.add(client.answers.popitem(last=False)[0])

    def flush(self) -> None:
        """Send the answers that are ready."""
        clients, self._with_unsent = self._with_unsent, []
        for client in clients:
            unsent, client.unsent = client.unsent, []
            for first in range(0, len(unsent), MOST_IN_ONE):
                part = unsent[first : first + MOST_IN_ONE]
                frames: Frames = [encode(Answers([answer.header for answer in part]))]
                for answer in part:
                    frames += answer.buffers
                self._send(client.route, frames)

    def _answer(self, client: _Client, answer: Answer) -> None:
        if not client.unsent:
            self._with_unsent.append(client)
        client.unsent.append(answer)

    def _on_call(self, client: _Client, name: bytes, message: Call, buffers: list[memoryview]) -> Request | None:
        call = message.call
        if call < client.oldest or call in client.running:
            return None
        if call in client.answers:
            self._answer(client, client.answers[call])
            return None
        if call in client.given_up:
            text = f"the answer of call {message.method!r} was given up: over {KEPT_ANSWERS} were not acknowledged"
            self._answer(client, Answer(Failure(call, "AnswerGivenUp", text), []))
            return None
        try:
            params = decode_value(message.params)
        except DECODE_FAILURES as failure:
            text = f"the parameters of call {message.method!r} do not decode: {failure}"
            self._answer(client, Answer(Failure(call, "DecodeError", text), []))
            return None
        client.running.add(call)
        return Request(name, call, message.method, params, buffers)

    def _client(self, name: bytes) -> _Client:
        client = self._clients.get(name)
        if client is None:
            excess = len(self._clients) + 1 - KEPT_CLIENTS
            if excess > 0:
                idle = (key for key, held in self._clients.items() if held.idle)
                for key in list(itertools.islice(idle, excess)):
                    del self._clients[key]
            client = self._clients[name] = _Client()
        self._clients.move_to_end(name)
        return client

    @staticmethod
    def _forget(client: _Client, oldest: int, done: list[int]) -> None:
        for call in done:
            client.answers.pop(call, None)
            client.given_up.discard(call)
        if oldest <= client.oldest:
            return
        client.oldest = oldest
        for call in [call for call in client.answers if call < oldest]:
            del client.answers[call]
        if client.given_up:
            client.given_up = {call for call in client.given_up if call >= oldest}


def result(request: Request, returned: Any) -> Answer:
    """The answer for what a handler returned: a value, or (value, list of buffers).

    Raises:
        TypeError: when the value is not made of msgpack types.
    """
    value: Any = returned
    buffers: Frames = []
    if isinstance(returned, tuple) and len(returned) == 2 and _are_buffers(returned[1]):
        value, buffers = returned
    return Answer(Result(request.call, msgspec.Raw(encode(value)), len(buffers)), buffers)


def failure(request: Request, type_name: str, text: str, traceback: str) -> Answer:
    """The answer for an exception."""
    return Answer(Failure(request.call, type_name, text, traceback), [])


def _are_buffers(candidate: Any) -> bool:
    return isinstance(candidate, list) and all(_is_buffer(item) for item in candidate)


def _is_buffer(candidate: Any) -> bool:
    """Whether it can be sent: one with gaps would end a `flush`, and with it the messages of others."""
    try:
        return memoryview(candidate).contiguous
    except TypeError:
        return False
