"""What a client knows of its calls, without I/O. The rules: rpc_protocol.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from miles_hpc.wire.codec import DECODE_FAILURES, Buffer
from miles_hpc.wire.rpc_messages import (
    RPC_PROTOCOL,
    Call,
    Calls,
    Failure,
    Frames,
    Hello,
    HelloAnswer,
    Result,
    decode_to_client,
    decode_value,
    encode,
)
from miles_hpc.wire.rpc_protocol import (
    MOST_IN_ONE,
    RpcError,
    RpcRemoteError,
    RpcUnknownOutcome,
    RpcUnreachable,
    are_buffers,
    buffers_of,
)

ACKNOWLEDGE_FROM = 64
"""Answers that wait for their acknowledgement before it is sent without a call."""
LARGE_ANSWER = 16 * 1024
"""Bytes of an answer that is acknowledged at once, so that the server need not hold it."""


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
        if buffers and not are_buffers(buffers):
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
                buffers = buffers_of(frames, next_buffer, answer.buffers)
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
