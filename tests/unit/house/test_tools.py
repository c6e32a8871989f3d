"""The tools' help, for who has nothing yet, so it makes and installs nothing; and which Python they take."""

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


@pytest.fixture
def found(tmp_path):
    """What `find_python` of tools/_venv.sh says where only these Pythons are: `python3_10="3.10.13"`."""
    for program in ("basename", "tail"):
        (tmp_path / program).symlink_to(shutil.which(program))

    def found(environment=None, **pythons):
        for name, version in pythons.items():
            program = tmp_path / name.replace("_", ".")
            old = int(tuple(map(int, version.split("."))) < (3, 10))
            program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || exit {old}\necho Python {version}\n')
            program.chmod(0o755)
        code = f'. "{ROOT}/tools/_venv.sh"; find_python'
        env = {"PATH": str(tmp_path), **(environment or {})}
        return subprocess.run(
            ["/bin/bash", "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
        )

    return found


def test_the_tools_take_the_first_python_that_is_new_enough(found):
    assert found(python3="3.9.2", python3_10="3.10.13").stdout == "python3.10\n"
    assert found(python3="3.9.2", python3_10="3.10.13", python3_13="3.13.0").stdout == "python3.13\n"
    assert found(python3="3.12.1", python3_13="3.13.0").stdout == "python3\n"
    assert found({"PYTHON": "python3.10"}, python3="3.12.1", python3_10="3.10.13").stdout == "python3.10\n"


def test_the_tools_say_which_python_is_too_old(found):
    done = found()
    assert done.returncode == 2 and "Python 3.10 or newer was not found (python3 is not there)" in done.stderr
    done = found(python3="3.6.15")
    assert done.returncode == 2 and "Python 3.10 or newer was not found (python3 is Python 3.6.15)" in done.stderr
    # One that is named is taken, or none.
    done = found({"PYTHON": "python3.9"}, python3="3.12.1", python3_9="3.9.2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "PYTHON=python3.9 is not Python 3.10 or newer: Python 3.9.2" in done.stderr
