"""The agent's own log: one JSON object a line, `{time, level, source, event, …}` as the hub's, time since 1970."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

WAITING_LIMIT = 10_000
"""Lines that wait for a stalled file system; more are lost, and counted."""


class JsonLog:
    """Takes lines without waiting; a thread appends them to a file, each with one write.

    A full or vanished file system loses lines, a stalled one holds them back, and neither does more to the agent.
    """

    def __init__(self, path: Path, source: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.dropped = 0
        self._source = source
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self._lines: queue.SimpleQueue[tuple[str, bytes, str] | None] = queue.SimpleQueue()
        # A daemon: one that hangs in the file system must not keep the agent from leaving.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, event: str, level: Literal["info", "warning", "error"] = "info", **fields: Any) -> None:
        """Append one line; warnings and errors go to stderr too, for people."""
        if self._lines.qsize() >= WAITING_LIMIT:
            self.dropped += 1
            return
        line = {"time": round(time.time(), 6), "level": level, "source": self._source, "event": event, **fields}
        text = " ".join(f"{name}={value}" for name, value in fields.items()) if level != "info" else ""
        self._lines.put((event, self._encode(line) + b"\n", text))

    def close(self, patience_s: float = 2.0) -> None:
        """Write what waits, for `patience_s` at most."""
        self._lines.put(None)
        self._thread.join(patience_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            event, content, text = line
            try:
                os.write(self._fd, content)
            except OSError as error:
                text = f"{text} (not in {self.path}: {error.strerror})".lstrip()
            if text:
                # Whoever read it may be gone, or its disk be full: the file gets the next lines all the same.
                with contextlib.suppress(OSError, ValueError):
                    print(f"{self._source}: {event}: {text}", file=sys.stderr, flush=True)
        os.close(self._fd)
