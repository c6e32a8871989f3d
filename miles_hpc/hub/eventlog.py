"""The hub's log: JSON lines in logs/attempt-<n>/hub.jsonl and, for people, short lines on stderr."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

WAITING_LIMIT = 10_000
"""Lines that wait for a stalled file system; more are dropped and counted."""


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
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, event: str, level: str = "info", **fields: Any) -> None:
        """Queue one line; dropped and counted when too many wait."""
        try:
            self._lines.put_nowait(
                {"time": round(time.time(), 6), "level": level, "source": "hub", "event": event, **fields}
            )
        except queue.Full:
            self.dropped += 1

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
                print(_for_people(line), file=self._stderr, flush=True)
            except OSError:
                # A full or broken file system must not end the log thread: later lines may get through.
                self.dropped += 1


def _for_people(line: dict[str, Any]) -> str:
    fields = {key: value for key, value in line.items() if key not in ("time", "level", "source", "event")}
    clock = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    return " ".join([clock, line["level"].upper(), "hub", line["event"], *(f"{k}={v}" for k, v in fields.items())])


class _Handler(logging.Handler):
    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = (
            "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        )
        self._log.write("log", level, logger=record.name, text=record.getMessage())
