"""Run files to a Config: composition, overrides, and errors that name file, key and remedy."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.config import tree
from miles_hpc.config.errors import ConfigError, ConflictError
from miles_hpc.config.node import RESOLVED
from miles_hpc.config.schema import Config
from miles_hpc.config.tree import Node

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SET = "--set"


class Loaded(msgspec.Struct, frozen=True):
    """A config, and where each of its keys was set: dotted key -> file, recipe or `--set`."""

    config: Config
    origins: dict[str, str]

    def origin(self, keys: Iterable[str]) -> str:
        """The files that set these keys, for a message about them; the first run file where all are defaults."""
        places = list(dict.fromkeys(self.origins[key] for key in keys if key in self.origins))
        return " and ".join(places) or self.origins.get("", "defaults")


def recipes_dir() -> Path:
    """Where the run files that ship with the package are."""
    return Path(__file__).resolve().parent.parent / "recipes"


def recipe_names() -> list[str]:
    """Names that `load` takes in place of a file."""
    return sorted(path.stem for path in recipes_dir().glob("*.toml"))


def load(files: Sequence[str | Path], sets: Sequence[str] = ()) -> Config:
    """Compose run files or recipe names from left to right, then `--set` overrides, into one Config.

    Tables are merged, every other value is replaced by a later one. Relative paths become absolute, seen from the file
    that sets them (from the current directory in a `--set`). The value `"none"` unsets an optional key.

    Raises:
        ConfigError: one line with file, key and remedy; ConflictError when values do not fit together.
    """
    return load_with_origins(files, sets).config


def load_with_origins(files: Sequence[str | Path], sets: Sequence[str] = ()) -> Loaded:
    """`load`, with the place where each key was set."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    directories: list[str] = []
    for name in files:
        path = _find(name)
        _take(_read(path), merged, origins, str(path), path.parent)
        origins.setdefault("", str(path))
        if path.parent != recipes_dir():
            directories.append(str(path.parent))
    for text in sets:
        _take(_parse_set(text), merged, origins, SET, Path.cwd())
    origins.setdefault("", SET)
    if _uses_own_code(merged):
        wanted = [*merged.get("python_path", []), *directories, str(Path.cwd())]
        merged["python_path"] = list(dict.fromkeys(wanted))
    try:
        return Loaded(msgspec.convert(merged, Config), origins)
    except msgspec.ValidationError as error:
        # Each value was checked alone before; what is left are relations inside one table (timing), which name both.
        text = str(error).split(" - at `$")[0]
        raise ConflictError((), f"{origins['']}: {text}") from error


def write_resolved(config: Config, run_dir: str | Path) -> Path:
    """Write the whole config, defaults included, to `config.resolved.toml`, as `write_toml` does."""
    return write_toml(config, Path(run_dir) / RESOLVED)


def write_toml(config: Config, target: Path) -> Path:
    """Write the whole config, defaults included; replaced as one file.

    The environment of a runtime may hold a key, whatever the mode of the user's own run file: with one, the file is
    for this user alone.
    """
    mode = 0o600 if any(runtime.env for runtime in config.runtimes.values()) else 0o666
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a process that had this number before
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(to_toml(config))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)
    return target


def to_toml(config: Config) -> str:
    """The whole config as TOML; unset optional keys are left out."""
    import tomli_w

    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def read_resolved(run_dir: str | Path) -> Config:
    """The config of a run directory.

    Raises:
        ConfigError: when the file is missing or was not written by this version of the schema.
    """
    path = Path(run_dir) / RESOLVED
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Config)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: not found: {run_dir} is not a run directory") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}: resolve the run again with `miles-hpc run … --resume`") from error


def _find(name: str | Path) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        raise ConfigError(f"{name}: is a directory, expected a TOML run file or a recipe ({', '.join(recipe_names())})")
    recipe = recipes_dir() / f"{name}.toml"
    if os.sep not in str(name) and recipe.is_file():
        return recipe
    near = _close(str(name), recipe_names())
    hint = f"did you mean the recipe {near[0]!r}?" if near else f"recipes are: {', '.join(recipe_names()) or 'none'}"
    raise ConfigError(f"{name}: no such run file and no recipe of that name; {hint}")


def _read(path: Path) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return parsed
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _parse_set(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"{SET} {text}: expected KEY=VALUE with a dotted key, such as rollout.batch_size=64")
    table: dict[str, Any] = {parts[-1]: _toml_value(value.strip())}
    for part in reversed(parts[:-1]):
        table = {part: table}
    return table


def _toml_value(text: str) -> Any:
    """A TOML value; what is not one is taken as a bare text, and so are times, which no setting is: 04:00:00."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    return text if len(parsed) > 1 or isinstance(value, datetime.date | datetime.time) else value


def _take(given: dict[str, Any], merged: dict[str, Any], origins: dict[str, str], origin: str, base: Path) -> None:
    """Check one source against the schema and merge it into what the earlier ones gave."""
    _take_table(given, tree.root(), merged, origins, origin, base, "")


def _take_table(
    given: dict[str, Any],
    nodes: dict[str, Node],
    merged: dict[str, Any],
    origins: dict[str, str],
    origin: str,
    base: Path,
    prefix: str,
) -> None:
    for name, value in given.items():
        dotted = prefix + name
        node = nodes.get(name)
        if node is None:
            raise ConfigError(f"{origin}: unknown key {dotted!r}{_nearest(name, nodes, prefix)}")
        if node.optional and value == "none":
            merged[name] = None
        elif node.children is not None:
            _expect_table(value, node, origin, dotted)
            if not isinstance(merged.get(name), dict):
                merged[name] = {}
            _take_table(value, node.children, merged[name], origins, origin, base, dotted + ".")
        elif node.each is not None:
            _expect_table(value, node, origin, dotted)
            table = merged.setdefault(name, {})
            for key, inner in value.items():
                _expect_table(inner, node, origin, f"{dotted}.{key}")
                _take_table(inner, node.each, table.setdefault(key, {}), origins, origin, base, f"{dotted}.{key}.")
        else:
            value = _checked(value, node, origin, dotted)
            if node.is_path and not (node.is_program and os.sep not in value):
                value = [absolute(v, base) for v in value] if isinstance(value, list) else absolute(value, base)
            if isinstance(value, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **value}
            else:
                merged[name] = value
        origins[dotted] = origin


def _expect_table(value: Any, node: Node, origin: str, dotted: str) -> None:
    if not isinstance(value, dict):
        inside = ", ".join(list(node.children or node.each or {})[:4])
        raise ConfigError(f"{origin}: {dotted}: expected a table ({inside}, …), found {_found(value)}")


def _checked(value: Any, node: Node, origin: str, dotted: str) -> Any:
    if node.type_text == "table of text" and isinstance(value, dict):
        return {key: _as_text(inner, origin, f"{dotted}.{key}") for key, inner in value.items()}
    try:
        msgspec.convert(value, node.convert)
    except msgspec.ValidationError as error:
        if origin == SET and type(value) in (int, float) and node.type_text.startswith("text"):
            return str(value)  # `--set model.name=7`: a bare word that happens to look like a number is still a text
        raise ConfigError(f"{origin}: {dotted}: expected {node.type_text}, found {_found(value)}") from error
    return value


def _as_text(value: Any, origin: str, dotted: str) -> str:
    """An environment variable's value; a number is taken as it is written."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{origin}: {dotted}: expected text, found {_found(value)}")
    return str(value)


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    kind = {int: "the integer", float: "the number", str: "the text", list: "the list"}.get(type(value), "the value")
    return f"{kind} {value!r}"


def _close(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The most similar name, if any is similar."""
    import difflib  # every agent reads a config, and few have a mistake in it

    return difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)


def _nearest(name: str, nodes: dict[str, Node], prefix: str) -> str:
    everywhere = tree.dotted_names()
    same = [dotted for dotted in everywhere if dotted.rpartition(".")[2] == name]
    here = _close(name, nodes, 0.6)
    if same or here:
        best = same[0] if same else prefix + here[0]
        return f": did you mean {best!r}?"
    near = _close(prefix + name, everywhere, 0.5)
    if not near:
        last = {dotted.rpartition(".")[2]: dotted for dotted in reversed(everywhere)}
        near = [last[found] for found in _close(name, last, 0.6)]
    if near:
        return f": did you mean {near[0]!r}?"
    table = f"[{prefix[:-1]}]" if prefix else "the top level"
    return f": {table} takes {', '.join(nodes)}"


def absolute(path: str, base: Path) -> str:
    """`path` seen from `base`; empty stays empty, `~` is expanded, a slice suffix `@[a:b]` is kept."""
    if not path:
        return path
    name, bracket, rest = path.partition("@[")
    return os.path.normpath(base / Path(name).expanduser()) + bracket + rest


def _uses_own_code(merged: dict[str, Any]) -> bool:
    """Whether some setting names a function or class of the user's own, as `module:name`."""
    settings = (
        ("reward", "function"), ("rollout", "generate"), ("rollout", "tools"), ("data", "source"), ("train", "trainer"),
    )  # fmt: skip
    named = [merged.get(table, {}).get(key) for table, key in settings]
    named += merged.get("rollout", {}).get("filters", [])
    named += [one.get("generate") for one in merged.get("eval", {}).get("datasets", {}).values()]
    return any(":" in str(one) for one in named)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
