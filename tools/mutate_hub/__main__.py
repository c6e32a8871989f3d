"""Mutation test of the hub's pure modules: seeded flips, each on a copy of the package of its own."""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tests_of_hub

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("state", "lifecycle", "membership", "healing", "leftovers", "recovery", "standing", "drain", "placement")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(tests_of_hub.LOADED_BEFORE))
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


@dataclass(frozen=True)
class Outcome:
    """What the tests said: `noticed` by a test, `SURVIVED` all; or nothing, of what cannot be run at all (`unusable`)
    or was not through in time (`too slow`)."""

    word: str
    by: str = ""


def sites_of(source: str) -> int:
    """How many flips a module has."""
    sites = Sites()
    sites.visit(ast.parse(source))
    return len(sites.found)


def flip(module: str, source: str, number: int) -> Flip:
    """One flip of a module."""
    tree, sites = ast.parse(source), Sites()
    sites.visit(tree)
    node = sites.found[number]
    line = getattr(node, "lineno", 0)
    what = _change(node)
    return Flip(module, line, what, ast.unparse(ast.fix_missing_locations(tree)))


def choose(sources: dict[str, str], count: int, seed: int) -> tuple[list[Flip], int]:
    """Flips in the order of their lines, none of them twice and none that changes nothing; and how many there are."""
    every = [(module, number) for module, source in sources.items() for number in range(sites_of(source))]
    seen = {ast.unparse(ast.parse(source)) for source in sources.values()}
    chosen: list[Flip] = []
    for module, number in random.Random(seed).sample(every, len(every)):
        if len(chosen) == count:
            break
        one = flip(module, sources[module], number)
        if one.source not in seen:
            seen.add(one.source)
            chosen.append(one)
    return sorted(chosen, key=lambda flip: (flip.module, flip.line)), len(every)


def keep_a_copy(base: Path) -> dict[str, str]:
    """Copy the package and its tests, which someone may go on to edit. Returns the source of each module."""
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "miles_hpc", base / "miles_hpc", ignore=left_out)
    shutil.copytree(ROOT / "tests" / "unit" / "hub", base / "tests", ignore=left_out)
    (base / "conftest.py").write_text(PROFILE)
    sources = {module: (base / "miles_hpc" / "hub" / f"{module}.py").read_text() for module in MODULES}
    for module, source in sources.items():
        # Written anew, as those with a flip are.
        (base / "miles_hpc" / "hub" / f"{module}.py").write_text(ast.unparse(ast.parse(source)))
    return sources


def outcome_of(base: Path, flip: Flip | None, timeout_s: float) -> Outcome:
    """Run all tests, on a copy of the hub with this flip, or without any."""
    with tempfile.TemporaryDirectory(prefix="mutate-hub-") as place:
        hub = base / "miles_hpc" / "hub"
        if flip is not None:
            hub = Path(shutil.copytree(hub, Path(place) / "hub"))
            for stale in (hub / "__pycache__").glob(f"{flip.module}.*"):
                stale.unlink()
            (hub / f"{flip.module}.py").write_text(flip.source)
        said = Path(place) / "said"
        tests = FORKS.Process(
            target=tests_of_hub.run,
            args=(base, hub, said, ROOT / "pyproject.toml"),
            kwargs={"keep_bytecode": flip is None},
        )
        tests.start()
        tests.join(timeout_s)
        if tests.is_alive():
            tests.kill()
            tests.join()
            return Outcome("too slow", f"no test had failed after {timeout_s:g} s")
        text = said.read_text(errors="replace") if said.exists() else ""
        if tests.exitcode == 0:
            return Outcome("SURVIVED")
        by = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", text, re.MULTILINE)
        if tests.exitcode == 1 and by:
            return Outcome("noticed", by[0])
        # A package that cannot be imported ends any run of any test, and says nothing about these.
        return Outcome("unusable", f"pytest ended with code {tests.exitcode}: {text[-500:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/mutate-hub", description=__doc__)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run of the tests")
    parser.add_argument("--least", type=float, default=0.85, help="share that must be noticed; otherwise exit code 1")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutate-hub-") as place:
        return examine(Path(place), given)


def examine(base: Path, given: argparse.Namespace) -> int:
    """Try the flips and print what became of each. Returns the exit code."""
    started = time.monotonic()
    sources = keep_a_copy(base)
    unchanged = outcome_of(base, None, given.timeout)
    if unchanged.word != "SURVIVED":
        print(f"the tests do not pass without any flip: {unchanged.word} {unchanged.by}", file=sys.stderr)
        return 2
    print(f"all tests pass without any flip, in {time.monotonic() - started:.0f} s", flush=True)
    chosen, sites = choose(sources, given.flips, given.seed)
    print(f"{len(chosen)} of {sites} flips in {', '.join(MODULES)}; seed {given.seed}", flush=True)
    started, by_word = time.monotonic(), dict[str, list[Flip]]()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        outcomes = pool.map(lambda one: outcome_of(base, one, given.timeout), chosen)
        for one, outcome in zip(chosen, outcomes, strict=True):
            by_word.setdefault(outcome.word, []).append(one)
            print(f"{outcome.word:9} {one.module}.py:{one.line}  {one.what}  {outcome.by}", flush=True)
    survivors, noticed = by_word.get("SURVIVED", []), len(by_word.get("noticed", []))
    # Of those that could be run to an end.
    share = noticed / max(1, noticed + len(survivors))
    left_out = "".join(f", {len(by_word[word])} {word}" for word in ("unusable", "too slow") if word in by_word)
    print(f"{share:.0%} noticed{left_out} in {time.monotonic() - started:.0f} s; survivors:")
    for one in survivors:
        print(f"  miles_hpc/hub/{one.module}.py:{one.line}  {one.what}")
    if given.json:
        left = [f"{one.module}.py:{one.line} {one.what}" for one in survivors]
        told = len(chosen) - noticed - len(survivors)
        print(json.dumps({"flips": len(chosen), "noticed": round(share, 4), "survivors": left, "left_out": told}))
    return 0 if share >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
