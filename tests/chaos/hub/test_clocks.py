"""The wall clocks of all programs jump, an hour forth and two back; deadlines are counted on clocks that do not."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ..conftest import SmokeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STEPS = "steps=24"
# The run must still be there for the second jump, on any machine.
PACE = "inference.fake_token_ms=30"
SHIM = Path(__file__).with_name("wall_clock.c")


@pytest.fixture
def shim(tmp_path):
    """The library that is preloaded, and the file that says by how many seconds the wall clock is off."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: `cc` is not installed")
    library, offset = tmp_path / "wall_clock.so", tmp_path / "offset"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SHIM)], check=True)
    offset.write_bytes(struct.pack("q", 0))
    return library, offset


def jump(offset, seconds):
    # In place: the programs have the file in their memory.
    with offset.open("r+b") as file:
        file.write(struct.pack("q", seconds))


def test_a_wall_clock_that_jumps_changes_nothing(shim, tmp_path, monkeypatch, undisturbed):
    library, offset = shim
    with monkeypatch.context() as faked:
        faked.setenv("LD_PRELOAD", str(library))
        faked.setenv("WALL_CLOCK", str(offset))
        run = SmokeRun(tmp_path / "run", STEPS, PACE)
    try:
        run.reach(4)
        before = run.events("hub_started")[0]["time"]
        jump(offset, 3600)
        run.reach(run.step() + 6)
        assert run.status() is not None
        jump(offset, -3600)
        run.reach(run.step() + 3)
        summary = run.end()
        assert summary["outcome"] == "finished" and summary["cells"]["healed"] == 0, run.tail()
        assert summary["seconds"]["ready"] <= summary["seconds"]["first_step"] <= summary["seconds"]["total"] < 290
        for event in ("node_suspect", "node_dead", "hub_stalled", "worker_exited"):
            told = [line for line in run.events(event) if not line.get("how", "").startswith("stopped")]
            assert all(line["level"] == "info" for line in told), told
        assert len(run.events("hub_started")) == 1
        assert run.events("verdict")[0]["time"] < before, "the programs did see the jumps"
        assert run.ledger() == undisturbed(STEPS)
    finally:
        run.close()
