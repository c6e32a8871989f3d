"""Between the agent and a worker's program: makes the process what a supervised one must be, then becomes the program.

`python -I -S spawn_shim.py PARENT_PID SIGNAL GROUP DEFAULT IGNORED PROGRAM ARGS…` (GROUP: a control group, or "";
DEFAULT and IGNORED: numbers of signals, with commas). A separate program instead of code between fork and exec: the
agent has ZeroMQ's threads, and Python code in a forked child of a threaded process can deadlock. The agent's main
thread starts it, so PDEATHSIG fires with the agent and not with some thread of it.

It stands between a death and the replacement's first instruction, so it imports next to nothing: `signal` with its
enums, or `ctypes`, alone would add a third to its time.
"""

from __future__ import annotations

import _signal
import os
import sys

EXEC_FAILED = 127
ORPHANED = 126
_PR_SET_PDEATHSIG = 1


def _main(argv: list[str]) -> int:
    parent, death_signal, group = int(argv[0]), int(argv[1]), argv[2]
    default, ignored, program = argv[3], argv[4], argv[5:]
    if group:
        _join(group)
    os.setsid()
    for number in default.split(","):
        _signal.signal(int(number), _signal.SIG_DFL)
    for number in ignored.split(","):
        _signal.signal(int(number), _signal.SIG_IGN)
    if failed := _die_with_parent(death_signal):
        print(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(failed)}", file=sys.stderr, flush=True)
        return EXEC_FAILED
    # Asked after the call: a parent that died before it would never cause the signal.
    if os.getppid() != parent:
        return ORPHANED
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot start {program[0]!r}: {error.strerror} ({' '.join(program)})", file=sys.stderr, flush=True)
        return EXEC_FAILED


def _die_with_parent(death_signal: int) -> int:
    """0, or the number of the error. As `wire.libc.call`, for which each worker would look through site-packages."""
    arguments = (_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    try:
        import _ctypes

        here = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
        if _ctypes.call_function(_ctypes.dlsym(here, "prctl"), arguments) == 0:
            return 0
    except (ImportError, AttributeError):
        pass  # another Python
    import ctypes

    return 0 if ctypes.CDLL(None, use_errno=True).prctl(*arguments) == 0 else ctypes.get_errno()


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
