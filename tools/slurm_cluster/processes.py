"""Commands that must succeed, and the daemons of ours: each is known by its recorded pid and start time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

BASE = Path(os.environ.get("MILES_HPC_SLURM_BASE", "/tmp/miles-hpc-slurm"))
SUBNET = "10.78.0"


def say(text: str) -> None:
    print(f"[slurm-cluster] {text}", flush=True)


def die(text: str) -> NoReturn:
    print(f"[slurm-cluster] {text}", file=sys.stderr)
    raise SystemExit(2)


def run(*argv: str | Path, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, **kwargs
    )
    if check and done.returncode != 0:
        die(f"{' '.join(map(str, argv))} failed with {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done


def wait_for(what: str, ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            die(f"gave up after {seconds:g} s waiting for {what}; logs are in {BASE / 'log'}")
        time.sleep(0.05)


def start_time(pid: int) -> str:
    """Field 22 of /proc/<pid>/stat; with it a reused pid is told from ours. Empty when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def record(name: str, pid: int) -> None:
    path = BASE / "run" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": pid, "start": start_time(pid)}))


def recorded(name: str) -> int | None:
    """The pid of a daemon that we started and that still runs."""
    path = BASE / "run" / f"{name}.json"
    if not path.exists():
        return None
    entry = json.loads(path.read_text())
    return entry["pid"] if entry["start"] and start_time(entry["pid"]) == entry["start"] else None


def stop(name: str, signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    for number in signals:
        pid = recorded(name)
        if pid is None:
            break
        os.kill(pid, number)
        deadline = time.monotonic() + 10
        while recorded(name) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    (BASE / "run" / f"{name}.json").unlink(missing_ok=True)


def adopt(name: str, pid_file: Path, seconds: float = 20) -> None:
    """Record a daemon that went to the background by itself and left a pid file."""

    def written() -> bool:
        return pid_file.exists() and pid_file.read_text().strip().isdigit()

    wait_for(f"the pid file of {name}", written, seconds)
    record(name, int(pid_file.read_text()))
