"""Frames of a control message: frame 0 says protocol and run, frame 1 holds the message.

Frame 0 is `mhpc` + one byte of protocol version + the run id in UTF-8; frame 1 is msgpack of one struct of
`messages.py`. Whatever arrives, decoding either returns a message or raises DecodeError.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from miles_hpc.wire import messages
from miles_hpc.wire.messages import PROTOCOL, Message

MAGIC = b"mhpc"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest frame that a control socket takes; a full table of a fleet is far below it."""

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_encoder = msgspec.msgpack.Encoder()

# msgspec reports malformed input by its own errors; the others come from values that no struct of ours can hold
# (an unhashable key or a 1000-fold nesting inside a field of type Any, a timestamp outside datetime's range).
DECODE_FAILURES = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)


class DecodeError(Exception):
    """Bytes that are no message of this run.

    Attributes:
        code: `malformed`, `version` (the peer speaks another protocol) or `run` (the peer belongs to another run).
    """

    def __init__(self, code: Literal["malformed", "version", "run"], text: str) -> None:
        super().__init__(text)
        self.code: Literal["malformed", "version", "run"] = code


@functools.lru_cache(maxsize=16)
def header(run_id: str) -> bytes:
    """Frame 0 of every message of a run."""
    return MAGIC + bytes((PROTOCOL,)) + run_id.encode()


def check_header(frame: Buffer, run_id: str) -> None:
    """Accept frame 0 of this protocol and run.

    Raises:
        DecodeError: otherwise; the text names what was expected and what was found.
    """
    raw = bytes(frame)
    if raw == header(run_id):
        return
    if raw[: len(MAGIC)] != MAGIC or len(raw) <= len(MAGIC):
        raise DecodeError("malformed", f"frame 0 starts with {raw[:8]!r}, expected {MAGIC!r} and a version")
    version = raw[len(MAGIC)]
    if version != PROTOCOL:
        raise DecodeError(
            "version",
            f"the peer speaks protocol {version}, this side {PROTOCOL}: install the same miles-hpc on all nodes",
        )
    found = raw[len(MAGIC) + 1 :].decode(errors="backslashreplace")
    if found != run_id:
        raise DecodeError("run", f"the peer belongs to run {found!r}, this side to run {run_id!r}")


def encode_body(message: Message) -> bytes:
    """Frame 1 of a message."""
    return _encoder.encode(message)


def encode(message: Message, run_id: str) -> list[bytes]:
    """The two frames of a message."""
    return [header(run_id), encode_body(message)]


def decode_to_hub(frames: Sequence[Buffer], run_id: str) -> Message:
    """Read a message that an agent, a program or an operator sent.

    Raises:
        DecodeError: when the frames are anything else.
    """
    return _decode(_decoder("ToHub"), frames, run_id)


def decode_from_hub(frames: Sequence[Buffer], run_id: str) -> Message:
    """Read a message that the hub sent.

    Raises:
        DecodeError: when the frames are anything else.
    """
    return _decode(_decoder("FromHub"), frames, run_id)


def decode_from_peer(frames: Sequence[Buffer], run_id: str) -> Message:
    """Read a message that another agent sent.

    Raises:
        DecodeError: when the frames are anything else.
    """
    return _decode(_decoder("BetweenAgents"), frames, run_id)


def make_ready(union: Literal["ToHub", "FromHub"]) -> None:
    """Make the decoder of one direction before its first message, where a process waits anyway."""
    _decoder(union)


@functools.cache
def _decoder(union: str) -> msgspec.msgpack.Decoder[Any]:
    """Made when it is first needed, since most processes read one direction only. `union` is a name in `messages`."""
    return msgspec.msgpack.Decoder(getattr(messages, union))


def _decode(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Buffer], run_id: str) -> Message:
    if not frames:
        raise DecodeError("malformed", "0 frames, expected 2")
    check_header(frames[0], run_id)
    if len(frames) != 2:
        raise DecodeError("malformed", f"{len(frames)} frames, expected 2")
    try:
        message = decoder.decode(frames[1])
    except DECODE_FAILURES as failure:
        raise DecodeError("malformed", f"frame 1 ({len(frames[1])} bytes) is no message: {failure}") from failure
    assert isinstance(message, Message)
    return message
