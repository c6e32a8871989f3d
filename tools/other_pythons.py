"""Can the oldest and the newest Python read every file, and do their standard libraries have what it names?

Looks with those of the two that are on this machine, and says which are not. Run by `tools/test lint`, from the root.
mypy asks the same of the package alone; tests and tools run on the oldest Python as well.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.10", "3.13")
ROOMS = ("miles_hpc", "tests", "tools", "examples")
LIBRARY = sys.stdlib_module_names | {"tomllib"}
"""What this Python has, and what only newer ones have."""


def find(version: str) -> str | None:
    """An interpreter of this version, in the PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    in_path = shutil.which(f"python{version}")
    for candidate in (in_path, *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))):
        # pyenv has shims in the PATH for versions that are not switched on.
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if (
            candidate
            and subprocess.run([candidate, "-Ic", code], capture_output=True).stdout.decode().strip() == version
        ):
            return candidate
    return None


def asked_of_version(node: ast.AST) -> bool:
    """Whether this is a branch for some versions only."""
    return isinstance(node, ast.If) and "version_info" in ast.dump(node.test)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """This node and those below, without branches for some versions only."""
    if not asked_of_version(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from nodes(child)


def follow(thing: object, names: list[str]) -> object:
    """What `thing.name.name…` is, as far as modules lead.

    Raises:
        AttributeError: a module does not have it.
    """
    for name in names:
        if not isinstance(thing, types.ModuleType):
            break
        if not hasattr(thing, name):
            try:
                importlib.import_module(f"{thing.__name__}.{name}")
            except ImportError:
                raise AttributeError(f"the standard library has no {thing.__name__}.{name}") from None
        thing = getattr(thing, name)
    return thing


def dotted(node: ast.Attribute) -> list[str]:
    """`["a", "b", "c"]` of `a.b.c`; empty when it begins with something else than a name."""
    names: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        names.insert(0, inner.attr)
        inner = inner.value
    return [inner.id, *names] if isinstance(inner, ast.Name) else []


def look(path: Path) -> None:
    """Raises whatever this Python has against the file."""
    tree = compile(path.read_text(encoding="utf-8"), str(path), "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    modules: dict[str, object] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, *below = alias.name.split(".")
                if top in LIBRARY:
                    module = importlib.import_module(top)
                    inner = follow(module, below)
                    modules[alias.asname or top] = inner if alias.asname else module
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARY:
            for alias in node.names:
                modules[alias.asname or alias.name] = follow(importlib.import_module(node.module), [alias.name])
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            first, *names = dotted(node) or [""]
            follow(modules.get(first), names)


def complaints(paths: list[Path]) -> list[str]:
    """What this Python has against the files, warnings of its compiler included."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in paths:
            try:
                look(path)
            except (SyntaxError, ImportError, AttributeError, Warning) as error:
                found.append(f"{path}: {type(error).__name__}: {error}")
    return found


def main() -> int:
    """Each Python of `VERSIONS`, or this one alone with `--this`."""
    if sys.argv[1:] == ["--this"]:
        found = complaints(sorted(path for room in ROOMS for path in Path(room).rglob("*.py")))
        print(*found, sep="\n", end="\n" if found else "")
        return bool(found)
    failed = False
    for version in VERSIONS:
        python = find(version)
        print(f"every file for Python {version}:", python or "skipped, it is not on this machine", flush=True)
        failed |= python is not None and subprocess.run([python, "-I", __file__, "--this"]).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
