"""Golden bytes, round trips and fuzz of every control message.

The golden file holds the frames of one full and one minimal sample of each message. It is append-only: a message that
gains a field keeps its old line as `<name>.<n>` (it must still decode), and the new bytes are added beside it. After a
deliberate change, run `python tests/unit/wire/golden/write.py` and look at the diff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from miles_hpc.wire import codec, messages
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.codec import DecodeError, decode_from_hub, decode_from_peer, decode_to_hub, encode
from miles_hpc.wire.messages import PROTOCOL, Heartbeat, PortInfo, Progress
from miles_hpc.wire.rendezvous import Rendezvous

pytestmark = pytest.mark.unit

RUN = "run-1"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "messages.json").read_text())
TO_HUB = get_args(messages.ToHub)
FROM_HUB = get_args(messages.FromHub)
BETWEEN_AGENTS = get_args(messages.BetweenAgents)
ALL = sorted({*TO_HUB, *FROM_HUB, *BETWEEN_AGENTS}, key=lambda kind: kind.__name__)
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def decode(frames: list[bytes], kind: type) -> Any:
    if kind in BETWEEN_AGENTS:
        return decode_from_peer(frames, RUN)
    return (decode_to_hub if kind in TO_HUB else decode_from_hub)(frames, RUN)


def holds(found: Any, wanted: Any) -> bool:
    """Whether everything of `wanted` is in `found`: structs inside a message may have gained fields since."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and holds(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(holds, found, wanted))
    return bool(found == wanted)


# ------------------------------------------------------------------------------------------ golden bytes
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_message_has_golden_bytes(kind):
    assert {f"{kind.__name__}.full", f"{kind.__name__}.minimal"} <= set(GOLDEN["messages"])


@pytest.mark.parametrize("name", sorted(GOLDEN["messages"]))
def test_golden_bytes_decode_to_what_they_were_made_of(name):
    entry = GOLDEN["messages"][name]
    kind = getattr(messages, name.split(".")[0])
    found = decode([bytes.fromhex(GOLDEN["header"]), bytes.fromhex(entry["hex"])], kind)
    assert type(found) is kind
    assert holds(msgspec.to_builtins(found), {"type": kind.__name__, **entry["fields"]})


@pytest.mark.parametrize("name", sorted(name for name in GOLDEN["messages"] if not name.split(".")[1].isdigit()))
def test_messages_encode_to_their_golden_bytes(name):
    entry = GOLDEN["messages"][name]
    kind = getattr(messages, name.split(".")[0])
    message = msgspec.convert({"type": kind.__name__, **entry["fields"]}, kind)
    assert [frame.hex() for frame in encode(message, GOLDEN["run_id"])] == [GOLDEN["header"], entry["hex"]]


def test_frame_0_is_magic_version_and_run_id():
    assert codec.header("run-1") == b"mhpc" + bytes([PROTOCOL]) + b"run-1"


# ------------------------------------------------------------------------------------------ round trips
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=10
)
addresses = st.builds(HostAndPort, host=st.from_regex(r"[a-z0-9.:]{1,20}", fullmatch=True), port=st.integers(0, 65535))
port_infos = st.builds(PortInfo, name=st.text(), static_port=st.integers(0, 65535), num_consecutive=st.integers(1, 99))

counted = st.integers(0, 2**31)
rendezvous_files = st.builds(
    Rendezvous,
    attempt=counted,
    epoch=counted,
    port=st.integers(1, 65535),
    addresses=st.lists(st.text(), min_size=1, max_size=3),
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    special = {Any: anything, HostAndPort: addresses, PortInfo: port_infos, str: st.text(), bool: st.booleans()}
    special |= {Rendezvous: rendezvous_files}
    special |= {int: st.integers(-(2**63), 2**64 - 1), float: st.floats(allow_nan=False), type(None): st.none()}
    if kind in special:
        return special[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=2)
    if args:
        return st.one_of(*map(values_of, args))
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: values_of(field.type) for field in fields})


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind):
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values_of(kind))
    def survives(message):
        frames = encode(message, RUN)
        assert decode(frames, kind) == message
        assert decode([memoryview(frame) for frame in frames], kind) == message

    survives()


# ------------------------------------------------------------------------------------------ fuzz
SAMPLES = [bytes.fromhex(entry["hex"]) for entry in GOLDEN["messages"].values()]


def decodes_or_says_why(frames: list[bytes]) -> None:
    for read in (decode_to_hub, decode_from_hub):
        try:
            assert isinstance(read(frames, RUN), messages.Message)
        except DecodeError as failure:
            assert failure.code in ("malformed", "version", "run")


@fuzz
@given(st.sampled_from(SAMPLES), st.data())
def test_truncated_messages_are_decode_errors(sample, data):
    cut = data.draw(st.integers(0, len(sample) - 1))
    with pytest.raises(DecodeError):
        decode_to_hub([codec.header(RUN), sample[:cut]], RUN)
    with pytest.raises(DecodeError):
        decode_from_hub([codec.header(RUN), sample[:cut]], RUN)


@fuzz
@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1))
def test_flipped_bytes_never_raise_anything_else(sample, flips):
    damaged = bytearray(sample)
    for place, value in flips:
        damaged[place % len(damaged)] = value
    decodes_or_says_why([codec.header(RUN), bytes(damaged)])


@fuzz
@given(st.lists(st.binary(max_size=200), max_size=4))
@example([codec.header(RUN), b"\x91" * 100_000])
@example([codec.header(RUN), b"\x81\xa4type\x80"])
def test_random_frames_never_raise_anything_else(frames):
    decodes_or_says_why(frames)
    decodes_or_says_why([codec.header(RUN), *frames])


@fuzz
@given(st.binary(max_size=200))
@example(b"\x91" * 100_000)  # nesting
@example(b"\x81\x80\xc0")  # a map as key
@example(b"\xd6\xff\xff\xff\xff\xff")  # a timestamp
@example(b"\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")  # a timestamp outside datetime's range
@example(b"\xdd\xff\xff\xff\xff")  # an array of 4 billion elements that are not there
@example(b"\xa2\xff\xff")  # no UTF-8
def test_a_free_field_may_hold_any_bytes(raw):
    body = encode(Progress(step=1, weight_version=1, summary={"a": None}), RUN)[1]
    assert body.endswith(b"\xa1a\xc0")
    decodes_or_says_why([codec.header(RUN), body[:-1] + raw])


# ------------------------------------------------------------------------------------------ what is refused, and how
def test_another_run_is_named():
    with pytest.raises(DecodeError, match="run 'other', this side to run 'run-1'") as caught:
        decode_to_hub(encode(Heartbeat(seq=1), "other"), RUN)
    assert caught.value.code == "run"


def test_another_protocol_version_is_named_whatever_follows():
    with pytest.raises(DecodeError, match=f"protocol {PROTOCOL + 1}, this side {PROTOCOL}") as caught:
        decode_to_hub([b"mhpc" + bytes([PROTOCOL + 1]) + b"?", b"?", b"?"], RUN)
    assert caught.value.code == "version"


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"mhpc"],
        [b"HTTP/1.1 GET"],
        [codec.header(RUN)],
        [codec.header(RUN), b""],
        [*encode(Heartbeat(seq=1), RUN), b""],
        [codec.header(RUN), msgspec.msgpack.encode({"seq": 1})],
        [codec.header(RUN), msgspec.msgpack.encode({"type": "Nothing", "seq": 1})],
        [codec.header(RUN), msgspec.msgpack.encode({"type": "Heartbeat", "seq": "1"})],
        [codec.header(RUN), msgspec.msgpack.encode({"type": "Heartbeat"})],
    ],
    ids=repr,
)
def test_what_is_no_message_is_malformed(frames):
    with pytest.raises(DecodeError) as caught:
        decode_to_hub(frames, RUN)
    assert caught.value.code == "malformed"


def test_a_message_for_the_other_direction_is_malformed():
    with pytest.raises(DecodeError):
        decode_from_hub(encode(Heartbeat(seq=1), RUN), RUN)
    with pytest.raises(DecodeError):
        decode_to_hub(encode(messages.Shutdown(reason="x"), RUN), RUN)


def test_a_field_of_a_newer_version_is_ignored():
    body = msgspec.msgpack.encode({"type": "Heartbeat", "seq": 1, "load": 0.5})
    assert decode_to_hub([codec.header(RUN), body], RUN) == Heartbeat(seq=1)


def with_newer_fields(kind: Any, value: Any) -> Any:
    """`value` as builtins, with a field that nobody knows in each struct of `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is list:
        return [with_newer_fields(args[0], item) for item in value]
    if origin is dict:
        return {key: with_newer_fields(args[1], item) for key, item in value.items()}
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return value
    if kind.__struct_config__.array_like:
        return [*value, "newer"]
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return {key: with_newer_fields(types.get(key, Any), item) for key, item in value.items()} | {"newer": 1}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_fields_of_a_newer_version_are_ignored_in_the_structs_inside_too(kind):
    fields = {"type": kind.__name__, **GOLDEN["messages"][f"{kind.__name__}.full"]["fields"]}
    body = msgspec.msgpack.encode(with_newer_fields(kind, fields))
    assert decode([codec.header(RUN), body], kind) == msgspec.convert(fields, kind)


def test_the_structs_inside_are_reached():
    found = with_newer_fields(messages.ReservePorts, {"ports": [{"name": "rpc"}], "keep": {"rpc": 1}})
    assert found == {"ports": [{"name": "rpc", "newer": 1}], "keep": {"rpc": 1}, "newer": 1}
