"""The rules of a call, without I/O: what a client sends when, and what a server runs.

Frames of a message: a header (one of the structs below, as a msgpack array), then for a call its parameters and for an
answer its result as msgpack, then any number of raw buffers.

- A client says ClientHello after each connect; the server answers with its incarnation. Calls go out only then.
- (client, call) names a call. A repeated one is never run twice by a server: it is still running, or its answer is kept
  until the client acknowledges it.
- After a reconnect to the same incarnation a client repeats its open calls; to another incarnation only those that
  their callers call idempotent: whether the last one ran them is unknown, and the other callers are told so.
- `oldest` of a call and an acknowledgement lets the server forget every lower call of that client.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from miles_hpc.wire.codec import DECODE_FAILURES, Buffer

RPC_PROTOCOL = 1
KEPT_ANSWERS = 256
"""Unacknowledged answers kept per client; older ones are given up and a repeat of their call is told so."""
KEPT_CLIENTS = 1024
"""Clients remembered; those without a running call that were silent longest are forgotten first."""


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


class Call(_Header, frozen=True):
    client: bytes
    call: int
    oldest: int
    method: str


class Acknowledge(_Header, frozen=True):
    client: bytes
    call: int
    oldest: int


class Result(_Header, frozen=True):
    call: int


class Failure(_Header, frozen=True):
    call: int
    type_name: str
    text: str
    traceback: str = ""


ToServer: TypeAlias = "Hello | Call | Acknowledge"
ToClient: TypeAlias = "HelloAnswer | Result | Failure"
Frames: TypeAlias = "list[Buffer]"

encode = msgspec.msgpack.Encoder().encode
decode_to_server: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Hello | Call | Acknowledge)
decode_to_client: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HelloAnswer | Result | Failure)


# ---------------------------------------------------------------------------------------------- client
class Outcome(NamedTuple):
    """How a call ended: `error`, or a value with its buffers."""

    value: Any
    frames: list[memoryview]
    error: RpcError | None


class _Open:
    def __init__(self, method: str, body: Frames, done: Callable[[Outcome], None], idempotent: bool) -> None:
        self.method = method
        self.body = body
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
        self._next = 1
        self._server = b""
        """Incarnation that the current connection leads to; empty before its hello was answered."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def linked(self) -> bool:
        """Whether calls go out at once."""
        return bool(self._server)

    def was_sent(self, call: int) -> bool:
        """Whether an open call was handed to some server."""
        return call in self._open and bool(self._open[call].sent_to)

    def begin(self, method: str, body: Frames, done: Callable[[Outcome], None], *, idempotent: bool = False) -> int:
        """Open a call; `body` is the encoded parameters and buffers. Its outcome goes to `done`, once."""
        call = self._next
        self._next += 1
        self._open[call] = _Open(method, body, done, idempotent)
        if self._server:
            self._send_call(call)
        return call

    def abandon(self, call: int) -> None:
        """Forget a call; `done` will not be called."""
        self._open.pop(call, None)

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
        # Acknowledged also when the caller has given up, so that the server can forget it.
        found = self._open.pop(message.call, None)
        self._send([encode(Acknowledge(self._client, message.call, self._oldest()))])
        if found is None:
            return
        if isinstance(message, Failure):
            error: RpcError = RpcRemoteError(message.type_name, message.text, message.traceback)
            found.done(Outcome(None, [], error))
            return
        try:
            value = msgspec.msgpack.decode(frames[1])
        except (*DECODE_FAILURES, IndexError) as failure:
            found.done(Outcome(None, [], RpcError(f"the answer of {found.method!r} does not decode: {failure}")))
            return
        found.done(Outcome(value, [memoryview(frame) for frame in frames[2:]], None))

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
                error = RpcUnknownOutcome(f"the server of call {found.method!r} was replaced before it answered")
                found.done(Outcome(None, [], error))
        for call in list(self._open):
            self._send_call(call)

    def _send_call(self, call: int) -> None:
        found = self._open[call]
        found.sent_to = self._server
        self._send([encode(Call(self._client, call, self._oldest(), found.method)), *found.body])

    def _oldest(self) -> int:
        return next(iter(self._open), self._next)


# ---------------------------------------------------------------------------------------------- server
class Request(NamedTuple):
    """A call to run."""

    client: bytes
    call: int
    method: str
    params: Any
    frames: list[memoryview]


class _Client:
    def __init__(self) -> None:
        self.route = b""
        self.oldest = 0
        self.running: set[int] = set()
        self.answers: OrderedDict[int, Frames] = OrderedDict()
        self.given_up: set[int] = set()


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

    def on_frames(self, route: bytes, frames: Sequence[Buffer]) -> Request | None:
        """A message came; returns a call that must be run now.

        Raises:
            one of codec.DECODE_FAILURES or IndexError: when it is none of ours.
        """
        message = decode_to_server.decode(frames[0])
        if isinstance(message, Hello):
            self._client(message.client).route = route
            self._send(route, [encode(HelloAnswer(RPC_PROTOCOL, self._incarnation))])
            return None
        client = self._client(message.client)
        client.route = route
        self._forget_below(client, message.oldest)
        if isinstance(message, Acknowledge):
            client.answers.pop(message.call, None)
            client.given_up.discard(message.call)
            return None
        return self._on_call(client, message, frames)

    def on_done(self, request: Request, answer: Frames) -> None:
        """A call has ended; `answer` from `result_frames` or `failure_frames` is sent and kept."""
        client = self._client(request.client)
        client.running.discard(request.call)
        self._send(client.route, answer)
        if request.call < client.oldest:
            return
        client.answers[request.call] = answer
        while len(client.answers) > KEPT_ANSWERS:
            client.given_up.add(client.answers.popitem(last=False)[0])

    def _on_call(self, client: _Client, message: Call, frames: Sequence[Buffer]) -> Request | None:
        call = message.call
        if call < client.oldest or call in client.running:
            return None
        if call in client.answers:
            self._send(client.route, client.answers[call])
            return None
        if call in client.given_up:
            text = f"the answer of call {message.method!r} was given up: over {KEPT_ANSWERS} were not acknowledged"
            self._send(client.route, [encode(Failure(call, "AnswerGivenUp", text))])
            return None
        params = msgspec.msgpack.decode(frames[1]) if len(frames) > 1 else None
        client.running.add(call)
        return Request(message.client, call, message.method, params, [memoryview(frame) for frame in frames[2:]])

    def _client(self, name: bytes) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
            if len(self._clients) > KEPT_CLIENTS:
                idle = next((key for key, held in self._clients.items() if not held.running and key != name), None)
                if idle is not None:
                    del self._clients[idle]
        self._clients.move_to_end(name)
        return client

    @staticmethod
    def _forget_below(client: _Client, oldest: int) -> None:
        if oldest <= client.oldest:
            return
        client.oldest = oldest
        for call in [call for call in client.answers if call < oldest]:
            del client.answers[call]
        client.given_up = {call for call in client.given_up if call >= oldest}


def result_frames(request: Request, returned: Any) -> Frames:
    """The answer for what a handler returned: a value, or (value, list of buffers).

    Raises:
        TypeError: when the value is not made of msgpack types.
    """
    value, buffers = returned, ()
    if isinstance(returned, tuple) and len(returned) == 2 and _are_buffers(returned[1]):
        value, buffers = returned
    return [encode(Result(request.call)), encode(value), *buffers]


def failure_frames(request: Request, type_name: str, text: str, traceback: str) -> Frames:
    """The answer for an exception."""
    return [encode(Failure(request.call, type_name, text, traceback))]


def _are_buffers(candidate: Any) -> bool:
    return isinstance(candidate, list) and all(_is_buffer(item) for item in candidate)


def _is_buffer(candidate: Any) -> bool:
    try:
        memoryview(candidate)
    except TypeError:
        return False
    return True
