"""Open files: what a hub needs for its fleet, and the limit raised to it, or refused with the numbers.

With too low a limit libzmq accepts nobody and says nothing, so this is settled before the hub is published.
"""

from __future__ import annotations

import resource

BASE_FILES = 128
"""Logs, pipes, libzmq's own, HTTP requests."""


class LimitTooLow(Exception):
    """The hard limit is below what is needed; the text has the numbers."""


def descriptors_needed(nodes: int, workers: int) -> int:
    """Open files of a hub: a connection per agent and per program, and as many again for 1 in 8 that reconnect."""
    connections = nodes + workers
    return BASE_FILES + connections + connections // 8


def raise_nofile(needed: int, what: str) -> None:
    """Raise this process's limit of open files to `needed` where it is lower; children inherit it.

    Raises:
        LimitTooLow: when that is not allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LimitTooLow(
            f"{what} needs {needed} open files, but the limit is {soft} and the hard limit {hard}: "
            f"raise it with `ulimit -Hn {needed}` or in /etc/security/limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
