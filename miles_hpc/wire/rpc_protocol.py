"""The rules of a call: what a client sends when, and what a server runs.

rpc_client_calls.py and rpc_server_calls.py are made of them, without I/O.

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

from collections.abc import Sequence
from typing import Any

from miles_hpc.wire.codec import Buffer

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


def buffers_of(frames: Sequence[Buffer], first: int, count: int) -> list[memoryview]:
    """Some buffers of a message. Raises IndexError when they are not all there."""
    if first + count > len(frames):
        raise IndexError(f"{len(frames) - 1} buffers came, {first + count - 1} were announced")
    return [memoryview(frame) for frame in frames[first : first + count]]


def are_buffers(candidate: Any) -> bool:
    """Whether it is a list of buffers that can be sent."""
    return isinstance(candidate, list) and all(_is_buffer(item) for item in candidate)


def _is_buffer(candidate: Any) -> bool:
    """Whether it can be sent: one with gaps would end a `flush`, and with it the messages of others."""
    try:
        return memoryview(candidate).contiguous
    except TypeError:
        return False
