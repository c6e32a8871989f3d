"""Messages of the RPC: a header of msgpack, then raw buffers. What they mean: rpc_protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from miles_hpc.wire.codec import Buffer

RPC_PROTOCOL = 2


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
