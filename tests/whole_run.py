"""A run from the command to its end, measured from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .conftest import unaccounted

COMMAND = [sys.executable, "-m", "miles_hpc.cli", "run"]


@dataclass
class Measured:
    """A finished run."""

    run_dir: Path
    out: str
    code: int
    seconds: float
    cpu_of_others_s: float
    pss_mib: float
    libraries: set[str]

    def allowed(self, seconds: float) -> float:
        """A bound for this machine alone, with what other programs took of its processors on top."""
        return seconds + 2 * max(0.0, self.cpu_of_others_s) / (os.cpu_count() or 1)

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir / name).read_text())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


def measured(run_dir: Path, *words: str, timeout_s: float = 120.0) -> Measured:
    """Run a command to its end, and look at its processes meanwhile."""
    out = run_dir.with_suffix(".out")
    busy, own = _busy_s(), os.times()
    started = time.monotonic()
    with out.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, *words, "--run-dir", str(run_dir)],
            env={**os.environ, "XDG_STATE_HOME": str(run_dir.parent / "state")},
            cwd=run_dir.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    most, libraries = 0, set()
    try:
        while process.poll() is None:
            assert time.monotonic() - started < timeout_s, out.read_text()
            pss = 0
            for pid in [process.pid, *marked(run_dir)]:
                pss += _pss_kib(pid)
                libraries |= _mapped(pid)
            most = max(most, pss)
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    seconds = time.monotonic() - started
    assert unaccounted(run_dir) == []
    now = os.times()
    ours = sum(now[:4]) - sum(own[:4])
    return Measured(
        run_dir, out.read_text(), process.returncode, seconds, _busy_s() - busy - ours, most / 1024, libraries
    )


def _busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + times.nice


def marked(run_dir: Path) -> Iterator[int]:
    """Living processes of a run."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("MILES_HPC_RUN_DIR") == str(run_dir):
                yield process.pid
        except psutil.Error:
            continue


def _pss_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _mapped(pid: int) -> set[str]:
    """Heavy libraries in a process's memory."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {name for name in ("libtorch", "pyarrow", "matplotlib") if name in text}
