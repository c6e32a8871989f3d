"""Memory of processes and the processes of one tree, read from /proc; standard library only, both sides use it."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

IDLE_S = 3.0
"""Seconds that a plane is left alone before its memory is read."""


def pss_mb(pids: list[int]) -> float:
    """Proportional set size of some processes together, in MB (10^6)."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return round(total / 1e6, 1)


def below(root: int) -> dict[int, str]:
    """Living descendants of a process: pid -> command line."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(place.name))
    found, todo = {}, [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            todo.append(pid)
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
    return found


def kind_of(command: str) -> str:
    """Short name of a process: its program, or the module or script that its interpreter runs.

    Ray's workers call themselves `ray::IDLE` and the like.
    """
    words = [word for word in command.split() if not word.startswith("-")]
    if not words:
        return "?"
    name = Path(words[0]).name
    return Path(words[1]).name if name.startswith("python") and len(words) > 1 else name


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


def wait_until_readable(path: Path, seconds: float) -> float:
    """Wait for a file with a number in it, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return float(path.read_text())
        except (OSError, ValueError):
            time.sleep(0.002)
    raise TimeoutError(f"{path} was not written within {seconds:g} s")


def raw_ping_pong(rounds: int) -> list[float]:
    """Seconds of round trips of 60 bytes over loopback TCP with another process: the floor of any call."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(64):
            connection.sendall(data)
        os._exit(0)
    with socket.create_connection(listener.getsockname()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        message, times = b"x" * 60, []
        for _ in range(rounds):
            started = time.perf_counter()
            connection.sendall(message)
            connection.recv(64)
            times.append(time.perf_counter() - started)
    listener.close()
    os.waitpid(child, 0)
    return times[rounds // 10 :]
