"""What every program of ours does first."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping

STOP_SIGNAL = "MILES_HPC_STOP_SIGNAL"
"""Environment variable in which an agent names the signal by which it stops this program."""
WAITING_LIMIT = 10_000
"""Log lines that wait for a stalled file system; more are left out."""
FLUSH_PATIENCE_S = 1.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(level: int = logging.INFO) -> None:
    """Log to stderr, which the agent keeps in one file per worker and generation. A second call only sets the level.

    Under an agent a thread writes: the file lies on the shared file system, and one that stalls must stall no loop.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = _Background() if STOP_SIGNAL in os.environ else logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        root.addHandler(handler)
    root.setLevel(level)


class _Background(logging.Handler):
    """Formats where it is called, writes in a thread; `logging.shutdown` waits for what is still to be written."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < WAITING_LIMIT:
            try:
                self._lines.put(self.format(record) + "\n")
            except Exception:  # an argument's own __str__, as for every handler
                self.handleError(record)

    def flush(self) -> None:
        done = threading.Event()
        self._lines.put(done)
        done.wait(FLUSH_PATIENCE_S)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with contextlib.suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()


def collect_rarely() -> None:
    """For programs with thousands of objects in flight, which the default thresholds of the garbage collector have it
    walk again and again. What is alive now is never walked."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def stop_signals(environ: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """The signals on which this program ends in order.

    Started by hand: SIGTERM and SIGINT. Under an agent only the one that it names, the others are ignored: Slurm sends
    SIGTERM to every process of a step, and a driver or trainer that obeyed would die before the commit of a drain.
    """
    named = environ.get(STOP_SIGNAL, "")
    return (signal.Signals[named],) if named else (signal.SIGTERM, signal.SIGINT)
