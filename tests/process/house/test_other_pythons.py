"""The programs that a node starts before anything of the environment is on the path, with the Pythons that are here."""

import subprocess
from pathlib import Path

import pytest

from tools import other_pythons

pytestmark = pytest.mark.process

WARDEN = Path(__file__).parents[3] / "miles_hpc" / "agent" / "warden.py"


@pytest.mark.parametrize("version", other_pythons.VERSIONS)
def test_the_warden_needs_nothing_but_the_standard_library_of(version, tmp_path):
    python = other_pythons.find(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    options = ["--run-id", "run", "--run-dir", str(tmp_path), "--attempt", "1", "--node", "node-00000"]
    argv = [python, "-W", "error", "-I", "-S", str(WARDEN), *options, "--", "/bin/true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
