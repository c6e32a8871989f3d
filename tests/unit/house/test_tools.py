"""The tools' help: for who has nothing yet, so it makes and installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
TOOLS = sorted(path.name for path in (ROOT / "tools").iterdir() if path.is_file() and not path.suffix)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_a_fresh_clone_can_be_asked_what_its_tools_do(tmp_path, tool, asked):
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").touch()
    done = subprocess.run(
        [tmp_path / "tools" / tool, asked], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert f"tools/{tool}" in done.stdout or "See --help" in done.stdout
    assert not done.stderr and "Traceback" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pyproject.toml", "tools"]
