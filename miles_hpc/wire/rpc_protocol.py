"""The rules of a call, without I/O: what a client sends when, and what a server runs.

Frames of a message: one of the structs of rpc_messages.py, as a msgpack array, then any number of raw buffers: those
of its first call or answer, of its second, and so on. What is begun, or done, in one turn of a loop leaves as one
message.

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
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from miles_hpc.wire.codec import DECODE_FAILURES, Buffer
from miles_hpc.wire.rpc_messages import (
    RPC_PROTOCOL,
    Answers,
    Call,
    Calls,
    Failure,
    Frames,
    Hello,
    HelloAnswer,
    Result,
    decode_to_client,
    decode_to_server,
    decode_value,
    encode,
)

KEPT_ANSWERS = 256
"""Unacknowledged answers kept per client; older ones are given up and a repeat of their call is told so."""
KEPT_CLIENTS = 1024
"""Clients remembered. Beyond that the longest silent ones are forgotten that have nothing open: a client with a running
call, or one that it has not acknowledged, may repeat it after a reconnect, and only who knows it does not run it twice.
So the table grows by the clients that have something open, and by those that ended within the last `GONE_AFTER_S`."""
GONE_AFTER_S = 3600.0
"""Silence after which a client whose calls have all been answered is taken for ended: no call is repeated that late."""
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


def _buffers(frames: Sequence[Buffer], first: int, count: int) -> list[memoryview]:
    """Some buffers of a message. Raises IndexError when they are not all there."""
    if first + count > len(frames):
        raise IndexError(f"{len(frames) - 1} buffers came, {first + count - 1} were announced")
    return [memoryview(frame) for frame in frames[first : first + count]]


# ---------------------------------------------------------------------------------------------- client
class Outcome(msgspec.Struct, frozen=True):
    """How a call ended: `error`, or a value with its buffers."""

    value: Any
    frames: list[memoryview]
    error: RpcError | None


class _Open(msgspec.Struct):
    method: str
    header: msgspec.Raw
    """The Call, encoded when it was begun: its parameters may change."""
    buffers: Frames
    done: Callable[[Outcome], None]
    idempotent: bool
    sent_to: bytes = b""


class ClientCalls:
    """Open calls of one client.

    Args:
        client: random name of this client.
        send: hands frames to the socket; they may be lost when the connection breaks.
    """

    def __init__(self, client: bytes, send: Callable[[Frames], None]) -> None:
        self._client = client
        self._send = send
        self._open: dict[int, _Open] = {}
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
        if buffers and not _are_buffers(buffers):
            raise TypeError(f"the frames of call {method!r} must be contiguous buffers")
        call = self._next
        header = msgspec.Raw(encode(Call(call, method, params, len(buffers))))
        self._next += 1
        self._open[call] = _Open(method, header, buffers, done, idempotent)
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
        if done:
            done = [] if max(done) < oldest else [call for call in done if call > oldest]
        headers: list[msgspec.Raw] = []
        frames: Frames = [b""]
        for call in unsent:
            found = self._open.get(call)
            if found is None:
                continue
            if len(headers) == MOST_IN_ONE:
                self._send_calls(frames, oldest, headers, done)
                headers, frames, done = [], [b""], []
            found.sent_to = self._server
            headers.append(found.header)
            if found.buffers:
                frames += found.buffers
        self._send_calls(frames, oldest, headers, done)

    def _send_calls(self, frames: Frames, oldest: int, headers: list[Any], done: list[int]) -> None:
        frames[0] = encode(Calls(self._client, oldest, headers, done))
        self._send(frames)

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
        if type(message) is HelloAnswer:
            self._on_hello_answer(message)
            return
        next_buffer = 1
        for answer in message.answers:
            buffers: list[memoryview] = []
            if isinstance(answer, Result) and answer.buffers:
                buffers = _buffers(frames, next_buffer, answer.buffers)
                next_buffer += answer.buffers
            # Acknowledged also when the caller has given up, so that the server can forget it.
            self._done.append(answer.call)
            found = self._open.pop(answer.call, None)
            if found is not None:
                found.done(_outcome(found.method, answer, buffers))
        large = len(frames[0]) >= LARGE_ANSWER or (
            next_buffer > 1 and sum(memoryview(frame).nbytes for frame in frames) >= LARGE_ANSWER
        )
        if large or len(self._done) >= ACKNOWLEDGE_FROM:
            self.flush(acknowledge=True)

    def fail_all(self, error: RpcError) -> None:
        """Give every open call this outcome."""
        while self._open:
            self._open.pop(next(iter(self._open))).done(Outcome(None, [], error))

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
                error = RpcUnknownOutcome(f"the server of call {found.method!r} was replaced before it answered")
                found.done(Outcome(None, [], error))
        self._unsent = list(self._open)
        self.flush()


def _outcome(method: str, answer: Result | Failure, buffers: list[memoryview]) -> Outcome:
    if not isinstance(answer, Result):
        return Outcome(None, [], RpcRemoteError(answer.type_name, answer.text, answer.traceback))
    try:
        return Outcome(decode_value(answer.value), buffers, None)
    except DECODE_FAILURES as failure:
        return Outcome(None, [], RpcError(f"the answer of {method!r} does not decode: {failure}"))


# ---------------------------------------------------------------------------------------------- server
class Request(msgspec.Struct, frozen=True):
    """A call to run."""

    client: _Client
    call: int
    method: str
    params: Any
    frames: list[memoryview]


class Answer(msgspec.Struct, frozen=True):
    """What a call gave, with its buffers."""

    header: Result | Failure
    buffers: Frames


class _Client:
    __slots__ = ("answers", "given_up", "heard_at", "oldest", "route", "running", "unsent")

    def __init__(self) -> None:
        self.route = b""
        self.heard_at = 0.0
        self.oldest = 0
        self.running: set[int] = set()
        self.answers: dict[int, Answer] = {}
        self.given_up: set[int] = set()
        self.unsent: list[Answer] = []

    def idle(self, now: float) -> bool:
        """Whether it will repeat nothing: it has acknowledged all that it called, or has ended without that."""
        return not self.running and (not (self.answers or self.given_up) or now - self.heard_at >= GONE_AFTER_S)


class ServerCalls:
    """What a server knows of its clients' calls.

    Args:
        incarnation: random name of this server object.
        send: (route, frames) hands an answer to the socket; it may be lost when the client is gone.
    """

    def __init__(
        self,
        incarnation: bytes,
        send: Callable[[bytes, Frames], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._send = send
        self._clock = clock
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._with_unsent: list[_Client] = []

    def on_frames(self, route: bytes, frames: Sequence[Buffer]) -> list[Request]:
        """A message came; returns the calls that must be run now.

        Raises:
            one of codec.DECODE_FAILURES or IndexError: when it is none of ours.
        """
        message = decode_to_server.decode(frames[0])
        if type(message) is Hello:
            self._client(message.client).route = route
            self._send(route, [encode(HelloAnswer(RPC_PROTOCOL, self._incarnation))])
            return []
        # Before any call is entered: one of a message that is dropped would be taken for running for ever.
        announced = sum([call.buffers for call in message.calls])
        if announced >= len(frames):
            raise IndexError(f"{len(frames) - 1} buffers came, {announced} were announced")
        client = self._client(message.client)
        client.route = route
        if message.done or message.oldest > client.oldest:
            self._forget(client, message.oldest, message.done)
        requests: list[Request] = []
        next_buffer = 1
        for call in message.calls:
            buffers: list[memoryview] = []
            if call.buffers:
                buffers = _buffers(frames, next_buffer, call.buffers)
                next_buffer += call.buffers
            request = self._on_call(client, call, buffers)
            if request is not None:
                requests.append(request)
        return requests

    def on_done(self, request: Request, answer: Answer) -> None:
        """A call has ended; `answer` of `result` or `failure` is kept, and sent by the next `flush`."""
        client = request.client
        client.running.discard(request.call)
        self._answer(client, answer)
        if request.call < client.oldest:
            return
        client.answers[request.call] = answer
        while len(client.answers) > KEPT_ANSWERS:
            oldest = next(iter(client.answers))
            del client.answers[oldest]
            client.given_up.add(oldest)

    def flush(self) -> None:
        """Send the answers that are ready."""
        clients, self._with_unsent = self._with_unsent, []
        for client in clients:
            unsent, client.unsent = client.unsent, []
            headers: list[Result | Failure] = []
            frames: Frames = [b""]
            for answer in unsent:
                if len(headers) == MOST_IN_ONE:
                    self._send_answers(client, frames, headers)
                    headers, frames = [], [b""]
                headers.append(answer.header)
                if answer.buffers:
                    frames += answer.buffers
            self._send_answers(client, frames, headers)

    def _send_answers(self, client: _Client, frames: Frames, headers: list[Result | Failure]) -> None:
        frames[0] = encode(Answers(headers))
        self._send(client.route, frames)

    def _answer(self, client: _Client, answer: Answer) -> None:
        if not client.unsent:
            self._with_unsent.append(client)
        client.unsent.append(answer)

    def _on_call(self, client: _Client, message: Call, buffers: list[memoryview]) -> Request | None:
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
        return Request(client, call, message.method, params, buffers)

    def _client(self, name: bytes) -> _Client:
        client = self._clients.get(name)
        now = self._clock()
        if client is None:
            excess = len(self._clients) + 1 - KEPT_CLIENTS
            if excess > 0:
                idle = (key for key, held in self._clients.items() if held.idle(now))
                for key in list(itertools.islice(idle, excess)):
                    del self._clients[key]
            client = self._clients[name] = _Client()
        client.heard_at = now
        self._clients.move_to_end(name)
        return client

    @staticmethod
    def _forget(client: _Client, oldest: int, done: list[int]) -> None:
        answers = client.answers
        for call in done:
            answers.pop(call, None)
            client.given_up.discard(call)
        client.oldest = max(oldest, client.oldest)
        for call in list(answers):
            if call < oldest:
                del answers[call]
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
