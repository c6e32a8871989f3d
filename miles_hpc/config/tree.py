"""The schema as a tree: what each table of a run file may hold, for the loader, `config schema` and the docs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from miles_hpc.config.schema import Config


class Node(msgspec.Struct, frozen=True):
    """A key of the schema.

    `children` is set on a table with fixed keys, `each` on a table whose keys the user chooses and whose values are
    tables. A leaf has neither.
    """

    name: str
    description: str
    type_text: str
    default: Any
    convert: Any
    is_path: bool
    is_program: bool
    optional: bool
    children: dict[str, Node] | None = None
    each: dict[str, Node] | None = None


@functools.cache
def root() -> dict[str, Node]:
    """The keys of the top level of a run file."""
    return _fields(Config)


def leaves(nodes: dict[str, Node] | None = None, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every key that takes a value, as (dotted name, node), in the order of the schema."""
    for name, node in (root() if nodes is None else nodes).items():
        dotted = prefix + name
        if node.children is not None:
            yield from leaves(node.children, dotted + ".")
        elif node.each is not None:
            yield from leaves(node.each, f"{dotted}.<name>.")
        else:
            yield dotted, node


def dotted_names() -> list[str]:
    """All keys and tables with fixed names, dotted."""
    names: list[str] = []

    def walk(nodes: dict[str, Node], prefix: str) -> None:
        for name, node in nodes.items():
            names.append(prefix + name)
            if node.children is not None:
                walk(node.children, f"{prefix}{name}.")

    walk(root(), "")
    return names


def _fields(struct: type[msgspec.Struct]) -> dict[str, Node]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _node(struct, field) for field in info.fields}


def _node(struct: type[msgspec.Struct], field: inspect.Field) -> Node:
    kind: inspect.Type = field.type
    description = ""
    extra: dict[str, Any] = {}
    if isinstance(kind, inspect.Metadata):
        description = (kind.extra_json_schema or {}).get("description", "")
        extra = kind.extra or {}
        kind = kind.type
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    optional = any(isinstance(one, inspect.NoneType) for one in types)
    inner = next(one for one in types if not isinstance(one, inspect.NoneType))
    children = each = None
    if isinstance(inner, inspect.StructType):
        children = _fields(inner.cls)
        description = description or (inner.cls.__doc__ or "").split("\n\n")[0]
    elif isinstance(inner, inspect.DictType) and isinstance(inner.value_type, inspect.StructType):
        each = _fields(inner.value_type.cls)
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else None
    return Node(
        name=field.encode_name,
        description=" ".join(description.split()),
        type_text=_type_text(inner) + (" or none" if optional else ""),
        default=default,
        convert=_hints(struct)[field.name],
        is_path="path" in extra,
        is_program="program" in extra,
        optional=optional,
        children=children,
        each=each,
    )


@functools.cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _type_text(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        return _type_text(kind.type)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        word = "integer" if isinstance(kind, inspect.IntType) else "number"
        bounds = [f"{sign} {bound:g}" for sign, bound in _bounds(kind) if bound is not None]
        return " ".join([word, " and ".join(bounds)]).strip()
    if isinstance(kind, inspect.StrType):
        return "text"
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.ListType):
        return f"list of {_type_text(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"list of {len(kind.item_types)} {_type_text(kind.item_types[0])}s"
    if isinstance(kind, inspect.DictType):
        return f"table of {_type_text(kind.value_type)}"
    if isinstance(kind, inspect.StructType):
        return "table"
    return "any value"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> list[tuple[str, float | None]]:
    return [(">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt)]
