"""Which Pythons the package is for."""

import re
from pathlib import Path

import pytest

from tools import other_pythons

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]


def test_everything_names_the_same_oldest_python():
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'^requires-python = ">=(.+)"$', project, re.MULTILINE)
    assert f'\npython_version = "{oldest}"\n' in project, "mypy"
    assert f'\ntarget-version = "py{oldest.replace(".", "")}"\n' in project, "ruff"
    assert f"({oldest.replace('.', ', ')})" in (ROOT / "tools" / "_venv.sh").read_text()
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text()
    assert other_pythons.VERSIONS[0] == oldest


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("import asyncio; asyncio.Barriers", "AttributeError: the standard library has no asyncio.Barriers"),
        ("from typing import Selves", "AttributeError: the standard library has no typing.Selves"),
        ("import os.paths", "AttributeError: the standard library has no os.paths"),
        ("def f():\n    import os as o\n    o.path.no", "AttributeError: the standard library has no posixpath.no"),
        ("f = [for]", "SyntaxError"),
        ("'\\d'", "invalid escape sequence"),
    ],
)
def test_a_file_that_a_python_is_too_old_for_is_named(tmp_path, line, complaint):
    path = tmp_path / "file.py"
    path.write_text(line)
    (found,) = other_pythons.complaints([path])
    assert found.startswith(f"{path}: ") and complaint in found


@pytest.mark.parametrize(
    "line",
    [
        "import sys\nif sys.version_info >= (9, 9):\n    from typing import Selves",
        "import os.path, concurrent.futures as c; os.path.join, c.Executor.nothing, os.sep.nothing",
        "from importlib import metadata; metadata.version; (1).nothing; x.nothing",
        "import numpy; from . import something; numpy.nothing",
    ],
)
def test_what_it_has_or_asks_the_version_for_is_not(tmp_path, line):
    path = tmp_path / "file.py"
    path.write_text(line)
    assert other_pythons.complaints([path]) == []


def test_pyenv_s_pythons_are_found_behind_shims_of_versions_that_are_not_switched_on(tmp_path, monkeypatch):
    shim, of_pyenv = tmp_path / "python3.99", tmp_path / "versions" / "3.99.7" / "bin" / "python"
    of_pyenv.parent.mkdir(parents=True)
    for program, text in ((shim, "#!/bin/sh\nexit 127\n"), (of_pyenv, "#!/bin/sh\necho 3.99\n")):
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert other_pythons.find("3.99") == str(of_pyenv)
    assert other_pythons.find("3.98") is None
