"""Calls of C library functions that take and return whole numbers. Standard library only: the warden uses it too.

By the extension below `ctypes`: that package itself is 3 ms and a third of a megabyte of every process that starts.
"""

from __future__ import annotations

import os


def call(name: str, *numbers: int) -> int:
    """What the function returns. Numbers are C ints.

    Raises:
        OSError: when it returns -1, with the error's number, or when the C library has no such function.
    """
    try:
        import _ctypes

        here = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
        found = int(_ctypes.call_function(_ctypes.dlsym(here, name), numbers))
    except (ImportError, AttributeError, OSError):
        found = -1
    # Once more by the documented way: for a Python without that, and for the error's number.
    return found if found != -1 else _by_ctypes(name, numbers)


def _by_ctypes(name: str, numbers: tuple[int, ...]) -> int:
    import ctypes

    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError as error:
        raise OSError(f"this C library has no {name}") from error
    found = int(function(*numbers))
    if found == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{numbers} failed: {os.strerror(code)}")
    return found
