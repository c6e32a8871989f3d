"""Between the agent and a worker's program: makes the process what a supervised one must be, then becomes the program.

`python -I -S spawn_shim.py PARENT_PID SIGNAL GROUP PACKAGE_ROOT PROGRAM ARGS…` (GROUP: a control group, or ""). A
separate program instead of code between fork and exec: the agent has ZeroMQ's threads, and Python code in a forked
child of a threaded process can deadlock. The agent's main thread starts it, so PDEATHSIG fires with the agent and not
with some thread of it.
"""

from __future__ import annotations

import os
import signal
import sys

EXEC_FAILED = 127
ORPHANED = 126


def _main(argv: list[str]) -> int:
    parent, death_signal, group, package_root = int(argv[0]), int(argv[1]), argv[2], argv[3]
    program = argv[4:]
    sys.path.append(package_root)
    from miles_hpc.agent.procfs import die_with_parent

    if group:
        _join(group)
    os.setsid()
    # Slurm signals every process of a step: USR1/USR2 would kill a third-party program before any drain, TERM one of
    # ours. SIG_IGN survives exec. Python itself ignores SIGPIPE and SIGXFSZ; a program expects the defaults.
    unwanted = {signal.SIGUSR1, signal.SIGUSR2}
    if "MILES_HPC_STOP_SIGNAL" in os.environ:
        unwanted |= {signal.SIGTERM, signal.SIGINT}
    for name in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = name in unwanted
        try:
            signal.signal(name, signal.SIG_IGN if ignored else signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # a signal that the C library keeps for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        die_with_parent(parent, death_signal)
    except ProcessLookupError:
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
