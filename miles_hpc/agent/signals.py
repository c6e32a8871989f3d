"""Signals as bytes of a pipe, so that the agent's loop can wait for them with everything else."""

from __future__ import annotations

import os
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def catch() -> int:
    """From now on nothing is interrupted by a signal of interest. Returns the end of the pipe to read from."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for signum in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, *STOP_SIGNALS):
        signal.signal(signum, lambda signum, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def received(read_end: int) -> list[signal.Signals]:
    """Which came since the last call, each once."""
    try:
        return [signal.Signals(number) for number in dict.fromkeys(os.read(read_end, 4096))]
    except BlockingIOError:
        return []
