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
    elif arguments.markdown:
        sys.stdout.write(markdown())
    else:
        sys.stdout.write(commented_toml())
    return FINISHED


def markdown() -> str:
    """The page docs/configuration.md, from the schema."""
    lines = [_PAGE_HEAD]
    for heading, description, rows in _sections(tree.root(), ""):
        lines.append(f"\n## {heading}\n")
        if description:
            lines.append(f"{description}\n")
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for node in rows:
            default = f"`{toml_value(node.default)}`" if node.default is not None else "unset"
            meaning = node.description.replace("|", "\\|")
            lines.append(f"| `{node.name}` | {node.type_text} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


_PAGE_HEAD = """# Configuration

Every setting of a run file. Written by `miles-hpc config schema --markdown` from `miles_hpc/config/schema.py`; a test
holds that the two agree.

- `miles-hpc run FILE_OR_RECIPE … --set key=value`: files are composed from left to right, then the `--set` values.
  Tables are merged, any other value is replaced by a later one.
- A value of `--set` is TOML (`rollout.batch_size=64`, `rollout.stop=["END"]`); what is not TOML is taken as a text.
- A relative path is seen from the file that sets it, and in a `--set` from the current directory.
- `"none"` unsets a key whose type ends in "or none", such as `--set model.make=none`.
- An unknown key, a wrong type and values that do not fit together are refused before anything is started.
- `miles-hpc config show FILE…` prints the config that results, `miles-hpc run … --dry-run` also where it would run."""


def _sections(nodes: dict[str, Node], prefix: str) -> Iterator[tuple[str, str, list[Node]]]:
    """(heading, description, leaves) of the top level and of each table."""
    here = [node for node in nodes.values() if node.children is None and node.each is None]
    if not prefix:
        yield "Top level", "", here
    for node in nodes.values():
        inner = node.children if node.children is not None else node.each
        if inner is None:
            continue
        name = f"{prefix}{node.name}" + ("" if node.children is not None else ".NAME")
        leaves = [child for child in inner.values() if child.children is None and child.each is None]
        yield f"[{name}]", node.description + (" Unset by default." if node.optional or node.each else ""), leaves
        yield from _sections(inner, f"{name}.")


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
