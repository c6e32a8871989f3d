"""`miles-hpc config show` and `config schema`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from miles_hpc.cli.exits import FINISHED, refuse
from miles_hpc.config import tree
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import to_toml
from miles_hpc.config.tree import Node


def show(arguments: argparse.Namespace) -> int:
    """Print the resolved config as TOML."""
    from miles_hpc.cli.preflight import resolve

    if not arguments.files and not arguments.sets:
        return refuse("config show: name a run file or a recipe, such as `miles-hpc config show quickstart`")
    try:
        sys.stdout.write(to_toml(resolve(arguments.files, arguments.sets).config))
    except ConfigError as error:
        return refuse(str(error))
    return FINISHED


def schema(arguments: argparse.Namespace) -> int:
    """Print every setting, as TOML with comments or as JSON schema."""
    if arguments.json:
        import msgspec

        from miles_hpc.config.schema import Config

        print(json.dumps(msgspec.json.schema(Config), indent=2))
    else:
        sys.stdout.write(commented_toml())
    return FINISHED


def commented_toml() -> str:
    """Every setting with its default, under a comment that says what it is."""
    return "".join(_table(tree.root(), ""))


def _table(nodes: dict[str, Node], name: str) -> Iterator[str]:
    for node in nodes.values():
        if node.children is None and node.each is None:
            yield f"# {node.description} ({node.type_text})\n"
            value = toml_value(node.default)
            yield f"{node.name} = {value}\n" if value else f"# {node.name} =\n"
    for node in nodes.values():
        inner = node.children if node.children is not None else node.each
        if inner is None:
            continue
        dotted = f"{name}{node.name}" if node.children is not None else f"{name}{node.name}.NAME"
        unset = node.optional or node.each is not None
        yield f"\n# {node.description}{' Unset by default.' if unset else ''}\n[{dotted}]\n"
        yield from _table(inner, f"{dotted}.")


def toml_value(value: Any) -> str:
    """A default as TOML; empty when it is unset."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{}" if not value else json.dumps(value)
    if isinstance(value, str | list | tuple):
        return json.dumps(value)
    return repr(value)
