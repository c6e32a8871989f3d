"""What does the control plane cost, beside Ray? See `--help`."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import IDLE_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIDE_S = 280.0
IMPORTS = 7

QUESTIONS = (
    ("a call, us", "rpc_p50_us", "ray_rpc_p50_us", 5.0),
    ("calls a second, 64 open", "rpc_per_s", "ray_rpc_per_s", 10.0),
    ("start to the first worker's first instruction, s", "ready_s", "ray_ready_s", 8.0),
    ("idle plane, PSS, MB", "pss_mb", "ray_pss_mb", 8.0),
    ("a killed process is known, ms", "death_ms_p50", "ray_death_ms_p50", 1.0),
)
"""What is compared: ours, Ray's, and by which factor ours is to be better."""
LIMITS = (
    ("death_ms_p99", 100.0),
    ("respawn_ms_p99", 500.0),
    ("agent_import_ms", 150.0),
    ("agent_pss_mb", 40.0),
    ("agent_files_opened", 600),
)


def side(python: str, script: str) -> dict[str, Any]:
    """Run one of the measuring programs; the last object on its stdout is its result."""
    done = subprocess.run([python, str(HERE / script)], capture_output=True, text=True, timeout=SIDE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr[-800:]}")
    # Ray may say something about the actors that were killed after that.
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found


def import_ms() -> float:
    """CPU time that importing the agent takes, beyond that of an empty program; the least of several."""

    def cpu_s(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    empty = min(cpu_s("pass") for _ in range(IMPORTS))
    return round(
        (min(cpu_s("import miles_hpc.agent.run, miles_hpc.agent.agent") for _ in range(IMPORTS)) - empty) * 1e3, 1
    )


def files_opened() -> int | None:
    """Files that an agent with a hub opens until it has joined; None where strace is not installed.

    The agent alone is counted: the hub and what is started later have processes of their own.
    """
    strace = shutil.which("strace")
    if strace is None:
        return None
    from miles_hpc.config.load import write_resolved
    from miles_hpc.config.schema import ClusterConfig, Config, ModelConfig
    from miles_hpc.launch.attempts import claim_attempt
    from miles_hpc.wire.security import create_secrets

    place = Path(tempfile.mkdtemp(prefix="bench-control-"))
    run_dir = place / "run"
    run_dir.mkdir()
    claim_attempt(run_dir)
    create_secrets(run_dir, 0)
    # The hub waits for a second node that never comes, so that no worker is started.
    write_resolved(Config(model=ModelConfig(path=str(place)), cluster=ClusterConfig(local_nodes=2)), run_dir)
    trace = place / "trace"
    agent = [sys.executable, "-m", "miles_hpc.agent.run", "--run-dir", str(run_dir), "--attempt", "0"]
    agent += ["--node-index", "0", "--address", "127.0.0.2", "--hub"]
    # -ff: one file per process; the agent's own is named after the pid that its log tells.
    process = subprocess.Popen(
        [strace, "-ff", "-qq", "-e", "trace=open,openat", "-o", str(trace), *agent],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pid = 0
    log = run_dir / "logs" / "attempt-0" / "node-00000" / "agent.jsonl"
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and '"welcome"' in log.read_text()):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        pid = json.loads(log.read_text().splitlines()[0])["pid"]
        tasks = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
        lines = [
            line
            for task in tasks
            for line in (place / f"trace.{task}").read_text().splitlines()
            if "open" in line and not re.search(r'"/proc/|"/sys/', line)
        ]
        return len(lines)
    finally:
        if pid:
            os.kill(pid, signal.SIGTERM)
        else:
            process.terminate()
        process.wait(30)
        shutil.rmtree(place, ignore_errors=True)


def table(found: dict[str, Any]) -> list[str]:
    """What was measured, line by line."""
    lines = [f"{'':<50} {'ours':>10} {'Ray':>10} {'ratio':>8} {'goal':>6}"]
    for text, ours, rays, goal in QUESTIONS:
        mine, other = found[ours], found.get(rays)
        shown = ratio = mark = ""
        if other:
            better = mine / other if ours == "rpc_per_s" else other / mine
            shown, ratio, mark = f"{other:g}", f"{better:.1f}", _mark(better < goal)
        lines.append(f"{text:<50} {mine:>10g} {shown:>10} {ratio:>8} {goal:>6g}{mark}")
    lines.append(f"{'a call over plain TCP, us':<50} {found['raw_p50_us']:>10g}")
    for name, limit in LIMITS:
        value = found[name]
        shown = "not known" if value is None else f"{value:g}"
        lines.append(f"{name:<50} {shown:>10} {'limit':>10} {limit:>8g}{_mark(value is not None and value > limit)}")
    return lines


def _mark(missed: bool) -> str:
    return "  missed" if missed else ""


def ray_python() -> str:
    return str(ROOT / ".runtimes" / "ray" / "bin" / "python")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench-control",
        description="What does the control plane cost, beside Ray?",
        epilog="Lines of goals and limits that were missed end with `missed`; it ends with 0 also then, since most "
        "depend on what else the machine does.",
    )
    parser.add_argument("--with-ray", action="store_true", help="measure Ray beside, in the same run")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()
    found: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2)}
    # In turns, so that what else the machine does meets both.
    found |= side(sys.executable, "calls.py")
    found |= side(ray_python(), "ray_side.py") if given.with_ray else {}
    found |= side(sys.executable, "plane_side.py")
    found["agent_import_ms"] = import_ms()
    found["agent_files_opened"] = files_opened()

    print("\n".join(table(found)))
    own = ", ".join(f"{name} {found[f'{name}_pss_mb']:g}" for name in ("hub", "agent", "warden"))
    print(f"after {IDLE_S:g} s of idleness ours is, in MB: {own}")
    if given.with_ray:
        parts = sorted(f"{kind} {'+'.join(map(str, sizes))}" for kind, sizes in found["ray_processes"].items())
        print(f"and Ray's: {', '.join(parts)}; without the driver and its two actors")
    print(f"load before: {found['load_before']}. Ratios hold on a busy machine, times do not. Ray's time of death is a")
    print("client's (a call raises); ours is the hub's, which tells clients at once. Ray has no dashboard here.")
    if given.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
