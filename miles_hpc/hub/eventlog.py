"""The hub's log: JSON lines in logs/attempt-<n>/hub.jsonl and, for people, short lines on stderr."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

WAITING_LIMIT = 10_000
"""Lines that wait for a stalled file system; more are dropped and counted."""
RECENT_LIMIT = 2000
"""Lines that are kept in memory for those who ask."""


class EventLog:
    """Takes lines without waiting; a thread writes them. Also a target for `logging` (`handler`).

    Schema of a line: the agents' too: `time` (wall clock, seconds), `level`, `source`, `event`, then its own fields.
    """

    def __init__(self, path: Path, stderr: TextIO = sys.stderr) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._stderr = stderr
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING_LIMIT)
        self.dropped = 0
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_LIMIT)
        self._written = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, event: str, level: str = "info", **fields: Any) -> None:
        """Queue one line; dropped and counted when too many wait."""
        line = {"time": round(time.time(), 6), "level": level, "source": "hub", "event": event, **fields}
        with self._lock:
            self._recent.append(line)
            self._written += 1
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def recent(self, since: int = 0, limit: int = RECENT_LIMIT) -> tuple[list[dict[str, Any]], int]:
        """The newest lines, at most `limit` and none before number `since`, and the number of the next line.

        Also from other threads. Values that JSON does not know come as text, as in the file.
        """
        with self._lock:
            lines, following = list(self._recent), self._written
        wanted = min(max(0, limit), len(lines), max(0, following - since))
        plain = json.loads(json.dumps(lines[len(lines) - wanted :], default=str))
        assert isinstance(plain, list)
        return plain, following

    def close(self, patience_s: float = 2.0) -> None:
        """Write what waits, for `patience_s` at most."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(patience_s)

    def handler(self) -> logging.Handler:
        """A handler that turns records of `logging` into lines with event "log"."""
        return _Handler(self)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if line is None:
                self._file.close()
                return
            try:
                self._file.write(json.dumps(line, default=str) + "\n")
                if self._lines.empty():
                    self._file.flush()
                print(for_people(line), file=self._stderr, flush=True)
            except OSError:
                # A full or broken file system must not end the log thread: later lines may get through.
                self.dropped += 1


def for_people(line: dict[str, Any]) -> str:
    """A line as text: time of day, level, source, event, fields."""
    fields = {key: value for key, value in line.items() if key not in ("time", "level", "source", "event")}
    clock = time.strftime("%H:%M:%S", time.localtime(line.get("time", 0.0)))
    head = [clock, str(line.get("level", "")).upper(), "hub", str(line.get("event", ""))]
    return " ".join([*head, *(f"{key}={value}" for key, value in fields.items())])


class _Handler(logging.Handler):
    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = (
            "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        )
        self._log.write("log", level, logger=record.name, text=record.getMessage())
