"""Between the agent and a worker's program: makes the process what a supervised one must be, then becomes the program.

`python -I -S spawn_shim.py PARENT_PID SIGNAL GROUP DEFAULT IGNORED PROGRAM ARGS…` (GROUP: a control group, or "";
DEFAULT and IGNORED: numbers of signals, with commas). A separate program instead of code between fork and exec: the
agent has ZeroMQ's threads, and Python code in a forked child of a threaded process can deadlock. The agent's main
thread starts it, so PDEATHSIG fires with the agent and not with some thread of it.

It stands between a death and the replacement's first instruction, so it imports next to nothing: the C library instead
of `signal`, which alone would double its time.
"""

from __future__ import annotations

import ctypes
import os
import sys

EXEC_FAILED = 127
ORPHANED = 126
_PR_SET_PDEATHSIG = 1
_SIG_DFL, _SIG_IGN = ctypes.c_void_p(0), ctypes.c_void_p(1)


def _main(argv: list[str]) -> int:
    parent, death_signal, group = int(argv[0]), int(argv[1]), argv[2]
    default, ignored, program = argv[3], argv[4], argv[5:]
    if group:
        _join(group)
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.restype = ctypes.c_void_p
    for number in default.split(","):
        libc.signal(int(number), _SIG_DFL)
    for number in ignored.split(","):
        libc.signal(int(number), _SIG_IGN)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(death_signal), 0, 0, 0) != 0:
        print(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
        return EXEC_FAILED
    # Asked after the call: a parent that died before it would never cause the signal.
    if os.getppid() != parent:
        return ORPHANED
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot start {program[0]!r}: {error.strerror} ({' '.join(program)})", file=sys.stderr, flush=True)
        return EXEC_FAILED


def _join(group: str) -> None:
    """Into the control group; a worker runs without one, too."""
    try:
        descriptor = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, b"0")
    except OSError:
        return
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    os._exit(_main(sys.argv[1:]))
