"""What a server knows of its clients and their calls, without I/O. The rules: rpc_protocol.py."""

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
    Failure,
    Frames,
    Hello,
    HelloAnswer,
    Result,
    decode_to_server,
    decode_value,
    encode,
)
from miles_hpc.wire.rpc_protocol import MOST_IN_ONE, are_buffers, buffers_of

KEPT_ANSWERS = 256
"""Unacknowledged answers kept per client; older ones are given up and a repeat of their call is told so."""
KEPT_CLIENTS = 1024
"""Clients remembered. Beyond that the longest silent ones are forgotten that have nothing open: a client with a running
call, or one that it has not acknowledged, may repeat it after a reconnect, and only who knows it does not run it twice.
So the table grows by the clients that have something open, and by those that ended within the last `GONE_AFTER_S`."""
GONE_AFTER_S = 3600.0
"""Silence after which a client whose calls have all been answered is taken for ended: no call is repeated that late."""


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
                buffers = buffers_of(frames, next_buffer, call.buffers)
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
    if isinstance(returned, tuple) and len(returned) == 2 and are_buffers(returned[1]):
        value, buffers = returned
    return Answer(Result(request.call, msgspec.Raw(encode(value)), len(buffers)), buffers)


def failure(request: Request, type_name: str, text: str, traceback: str) -> Answer:
    """The answer for an exception."""
    return Answer(Failure(request.call, type_name, text, traceback), [])
