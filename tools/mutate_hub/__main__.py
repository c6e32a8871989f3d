"""Mutation test of the hub's pure modules: seeded flips, each on a copy of the package of its own."""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("state", "lifecycle", "membership", "healing", "leftovers", "recovery", "standing", "drain", "placement")
SLOWEST = "test_any_order.py"
"""Runs last: most flips are noticed before it."""
PROFILE = """
from hypothesis import Phase, settings

# That a flip is noticed is enough, and to make the example small takes minutes.
settings.register_profile("notice", phases=[Phase.explicit, Phase.generate])
"""

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Flip:
    """One change of one module."""

    module: str
    line: int
    what: str
    source: str


class Sites(ast.NodeVisitor):
    """Every node that can be flipped, in source order; what only words a log line is left alone."""

    def __init__(self) -> None:
        self.found: list[ast.AST] = []

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "note":
            return
        if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            self.found.append(node)
        if isinstance(node.func, ast.Name) and node.func.id == "round":
            return
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        # Its decorators say how the class is made, not what the hub does.
        for part in node.body:
            self.visit(part)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            self.found.append(node)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.found.append(node)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # `A | B` of types and texts are no arithmetic.
        if type(node.op) in _BINARY:
            self.found.append(node)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.found.append(node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool | int | float):
            self.found.append(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self.generic_visit(node)


def _change(node: ast.AST) -> str:
    """Flip a node in place. Returns what was done."""
    match node:
        case ast.Compare():
            before = node.ops[0]
            node.ops[0] = _COMPARE[type(before)]()
            return f"{type(before).__name__} -> {type(node.ops[0]).__name__}"
        case ast.BoolOp():
            before_name = type(node.op).__name__
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return f"{before_name} -> {type(node.op).__name__}"
        case ast.BinOp():
            before_name = type(node.op).__name__
            node.op = _BINARY[type(node.op)]()
            return f"{before_name} -> {type(node.op).__name__}"
        case ast.UnaryOp():
            # `not x` becomes `bool(x)`: `not not x` keeps the node's place.
            node.operand = ast.UnaryOp(op=ast.Not(), operand=node.operand)
            return "not dropped"
        case ast.Call(func=ast.Name(id=name)):
            node.func = ast.Name(id=_CALLS[name], ctx=ast.Load())
            return f"{name} -> {_CALLS[name]}"
        case ast.Constant(value=bool()):
            node.value = not node.value
            return f"{not node.value} -> {node.value}"
        case ast.Constant(value=int() | float()):
            before_value = node.value
            node.value = before_value + 1 if isinstance(before_value, int) else before_value * 2 + 1
            return f"{before_value} -> {node.value}"
    raise AssertionError(f"{ast.dump(node)} is no site")


def sites_of(module: str) -> int:
    """How many flips a module has."""
    sites = Sites()
    sites.visit(ast.parse(_source(module)))
    return len(sites.found)


def flip(module: str, number: int) -> Flip:
    """One flip of a module."""
    tree, sites = ast.parse(_source(module)), Sites()
    sites.visit(tree)
    node = sites.found[number]
    line = getattr(node, "lineno", 0)
    what = _change(node)
    return Flip(module, line, what, ast.unparse(ast.fix_missing_locations(tree)))


def _source(module: str) -> str:
    return (ROOT / "miles_hpc" / "hub" / f"{module}.py").read_text()


def survives(flip: Flip, timeout_s: float) -> bool:
    """Whether all tests pass with the flip. A test run that hangs has noticed it."""
    with tempfile.TemporaryDirectory(prefix="mutate-hub-") as place:
        root = Path(place)
        shutil.copytree(ROOT / "miles_hpc", root / "miles_hpc", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests" / "unit" / "hub", root / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "miles_hpc" / "hub" / f"{flip.module}.py").write_text(flip.source)
        (root / "conftest.py").write_text(PROFILE)
        files = sorted((root / "tests").glob("test_*.py"), key=lambda path: (path.name == SLOWEST, path.name))
        argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        argv += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(root)]
        argv += ["--hypothesis-profile", "notice", *map(str, files)]
        env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(argv, cwd=root, env=env, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/mutate-hub", description=__doc__)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run of the tests")
    parser.add_argument("--least", type=float, default=0.85, help="share that must be noticed; otherwise exit code 1")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    given = parser.parse_args()
    every = [(module, number) for module in MODULES for number in range(sites_of(module))]
    places = random.Random(given.seed).sample(every, min(given.flips, len(every)))
    chosen = sorted((flip(*place) for place in places), key=lambda flip: (flip.module, flip.line))
    print(f"{len(chosen)} of {len(every)} flips in {', '.join(MODULES)}; seed {given.seed}", flush=True)
    started, survivors = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        outcomes = pool.map(lambda one: survives(one, given.timeout), chosen)
        for one, survived in zip(chosen, outcomes, strict=True):
            if survived:
                survivors.append(one)
            print(f"{'SURVIVED' if survived else 'noticed ':9} {one.module}.py:{one.line}  {one.what}", flush=True)
    share = 1 - len(survivors) / len(chosen)
    print(f"{share:.0%} noticed in {time.monotonic() - started:.0f} s; survivors:")
    for one in survivors:
        print(f"  miles_hpc/hub/{one.module}.py:{one.line}  {one.what}")
    if given.json:
        left = [f"{one.module}.py:{one.line} {one.what}" for one in survivors]
        print(json.dumps({"flips": len(chosen), "noticed": round(share, 4), "survivors": left}))
    return 0 if share >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
