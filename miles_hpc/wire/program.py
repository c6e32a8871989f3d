"""What every program of ours does first."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping

STOP_SIGNAL = "MILES_HPC_STOP_SIGNAL"
"""Environment variable in which an agent names the signal by which it stops this program."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(level: int = logging.INFO) -> None:
    """Log to stderr, which the agent keeps in one file per worker and generation. A second call only sets the level."""
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        root.addHandler(handler)
    root.setLevel(level)


def stop_signals(environ: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """The signals on which this program ends in order.

    Started by hand: SIGTERM and SIGINT. Under an agent only the one that it names, the others are ignored: Slurm sends
    SIGTERM to every process of a step, and a driver or trainer that obeyed would die before the commit of a drain.
    """
    named = environ.get(STOP_SIGNAL, "")
    return (signal.Signals[named],) if named else (signal.SIGTERM, signal.SIGINT)
