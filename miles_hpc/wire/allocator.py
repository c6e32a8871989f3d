"""How the C library's memory allocator is to treat a small process with several threads."""

from __future__ import annotations

import contextlib

from miles_hpc.wire import libc

_M_ARENA_MAX = -8


def one_arena() -> None:
    """Let all threads share one heap: glibc would give each its own, of which most stays empty. Before any thread."""
    with contextlib.suppress(OSError):  # another C library
        libc.call("mallopt", _M_ARENA_MAX, 1)


def give_back() -> None:
    """Return free memory to the system: after the imports, much of the heap is."""
    with contextlib.suppress(OSError):
        libc.call("malloc_trim", 0)
