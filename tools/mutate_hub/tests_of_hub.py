"""Runs the hub's unit tests on a copy of its modules, in a process that has loaded all the rest before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LOADED_BEFORE = (
    "pytest", "hypothesis.stateful", "miles_hpc.config.schema", "miles_hpc.config.timing", "miles_hpc.specs.base",
    "miles_hpc.wire.messages", "miles_hpc.wire.codec",
)  # fmt: skip
"""Nothing of the hub: of that, each run has its own."""
SLOWEST = "test_any_order.py"
"""Runs last: most flips are noticed before it."""
TEST_LIMIT_S = 60
"""For one test, as in tools/test: a flip that makes a test run for ever is noticed by that test."""


def run(base: Path, hub: Path, said: Path, ini: Path, *, keep_bytecode: bool) -> None:
    """Ends this process with pytest's exit code.

    Args:
        base: copy of the package and the tests.
        hub: directory of the hub's modules.
        said: file for what pytest says.
        ini: pytest's settings.
        keep_bytecode: for later runs on the same files.
    """
    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = not keep_bytecode
    import miles_hpc

    miles_hpc.__path__ = [str(base / "miles_hpc")]
    import miles_hpc.hub

    miles_hpc.hub.__path__ = [str(hub)]
    import pytest

    files = sorted((base / "tests").glob("test_*.py"), key=lambda path: (path.name == SLOWEST, path.name))
    options = ["-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", str(ini), "--rootdir", str(base)]
    options += ["--timeout", str(TEST_LIMIT_S), "--hypothesis-profile", "notice"]
    os.chdir(base)
    code = int(pytest.main([*options, *map(str, files)]))
    origin = Path(sys.modules["miles_hpc.hub.state"].__file__ or "") if "miles_hpc.hub.state" in sys.modules else None
    if code in (0, 1) and (origin is None or origin.parent != hub):
        print(f"the tests ran on {origin}, not on {hub}")
        code = 99
    sys.stdout.flush()
    os._exit(code)
