"""The agent's own log: one JSON object a line, `{time, level, source, event, …}` as the hub's, time since 1970."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec


class JsonLog:
    """Appends to a file, each line with one write. A full or vanished file system loses lines, never the agent."""

    def __init__(self, path: Path, source: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._source = source
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def write(self, event: str, level: Literal["info", "warning", "error"] = "info", **fields: Any) -> None:
        """Append one line; warnings and errors go to stderr too, for people."""
        line = {"time": round(time.time(), 6), "level": level, "source": self._source, "event": event, **fields}
        try:
            os.write(self._fd, self._encode(line) + b"\n")
        except OSError as error:
            print(f"{self.path}: {error.strerror}: lost {event}", file=sys.stderr)
        if level != "info":
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            print(f"{self._source}: {event}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        os.close(self._fd)
