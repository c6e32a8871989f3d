"""Add the golden bytes of messages and fields that have none; never changes a line that is there.

Run it from the repository's root. A message whose sample no longer encodes to its line has changed: its old line is
kept under the next number, because bytes of that kind must still decode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from miles_hpc.wire import codec, messages
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import PortInfo

PATH = Path(__file__).with_name("messages.json")


def sample(kind: Any, name: str) -> Any:
    """A value of a type that differs from every default, the same at each run."""
    simple = {Any: ["x", 1, 0.5, None], str: f"{name} ä", bool: True, int: len(name) + 1000, float: len(name) + 0.25}
    if kind in simple:
        return simple[kind]
    if kind is HostAndPort:
        return HostAndPort("10.0.0.7", 20001)
    if kind is PortInfo:
        return PortInfo(name="rpc", static_port=20000, allow_dynamic=False, mode="master", num_consecutive=2)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return args[-1]
    if origin is list:
        return [sample(args[0], name)]
    if origin is dict:
        return {"key": sample(args[1], name)}
    if args:
        return sample(args[0], name)
    return kind(**{field.name: sample(field.type, field.name) for field in msgspec.structs.fields(kind)})


def minimal(kind: type) -> Any:
    """Only the fields that have no default."""
    required = [field for field in msgspec.structs.fields(kind) if field.required]
    return kind(**{field.name: sample(field.type, field.name) for field in required})


def main() -> None:
    found = json.loads(PATH.read_text()) if PATH.exists() else {"messages": {}}
    found |= {"run_id": "run-1", "header": codec.header("run-1").hex()}
    kinds = {kind for union in (messages.ToHub, messages.FromHub, messages.BetweenAgents) for kind in get_args(union)}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        for form, message in (("full", sample(kind, kind.__name__)), ("minimal", minimal(kind))):
            name = f"{kind.__name__}.{form}"
            fields = msgspec.to_builtins(message)
            fields.pop("type")
            entry = {"hex": codec.encode_body(message).hex(), "fields": fields}
            old = found["messages"].get(name)
            if old == entry:
                continue
            if old is not None:
                number = sum(key.startswith(f"{kind.__name__}.") for key in found["messages"]) - 1
                found["messages"][f"{kind.__name__}.{number}"] = old
            found["messages"][name] = entry
            print(f"{'changed' if old else 'added'} {name}")
    PATH.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
