"""What an agent costs: figures that the design promises."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.wire.messages import Shutdown

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


EMPTY_S = 0.020
WHOLE_AGENT = "import miles_hpc.agent.run, miles_hpc.agent.agent"
"""The second is imported when the hub has been started."""


def _cpu_s(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_how_long_does_the_agent_take_to_import():
    """CPU time beyond that of an empty program: the clock would measure what else the machine does.

    Even CPU time grows on a busy machine, by what an empty program takes there beyond its 20 ms.
    """
    empty = min(_cpu_s("pass") for _ in range(5))
    seconds = min(_cpu_s(WHOLE_AGENT) for _ in range(5)) - empty
    assert seconds <= 0.150 * max(1.0, empty / EMPTY_S), f"{seconds * 1000:.0f} ms, empty {empty * 1000:.0f} ms"


def test_the_agent_imports_the_standard_library_msgspec_zmq_psutil_and_nothing_else():
    code = f"import sys; {WHOLE_AGENT}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {"miles_hpc", "msgspec", "zmq", "psutil", "_psutil_linux", "_psutil_posix"}
    # What site-packages load by themselves at every start (.pth files) is not the agent's doing.
    empty = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout.split()
    foreign = {name.partition(".")[0] for name in set(loaded) - set(empty)} - sys.stdlib_module_names - ours
    assert foreign <= {"typing_extensions", "tomli", "org", "cython_runtime", "_cython_3_3_1"}, foreign
    assert not {"asyncio", "ssl", "difflib", "multiprocessing"} & set(loaded)


def test_an_agent_starts_the_hub_before_it_imports_what_only_talks_to_it():
    code = "import sys; import miles_hpc.agent.run; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "miles_hpc.agent.beginning" in loaded and not {"zmq", "miles_hpc.agent.agent"} & set(loaded)


def test_how_much_memory_does_an_agent_take(hub, node, nodes):
    rollup = Path(f"/proc/{node.pid}/smaps_rollup").read_text()
    pss_kib = int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])
    assert pss_kib <= 40 * 1024, f"{pss_kib} KiB"
    warden = Path(f"/proc/{nodes.wardens['node-00000'].pid}/smaps_rollup").read_text()
    warden_kib = int(re.search(r"^Pss:\s+(\d+)", warden, re.MULTILINE)[1])
    assert warden_kib <= 10 * 1024, f"{warden_kib} KiB"


def test_how_many_files_does_an_agent_open_until_it_has_joined(hub, nodes, tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    agent = [sys.executable, "-m", "miles_hpc.agent.run", "--run-dir", str(nodes.run_dir), "--run-id", nodes.run_id]
    agent += ["--attempt", "0", "--node-index", "0", "--address", "127.0.0.2"]
    process = subprocess.Popen([strace, "-f", "-qq", "-e", "trace=open,openat", "-o", str(trace), *agent])
    try:
        hub.join()
        opened = [line for line in trace.read_text().splitlines() if "open" in line and "/proc/" not in line]
        assert 50 < len(opened) <= 600, len(opened)
        hub.send("node-00000", Shutdown(reason="done"))
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, 9)
            process.wait()
