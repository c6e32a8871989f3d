"""Imports msgspec without `typing_extensions`: the first import of a program that is to start fast and stay small.

Where that package is installed msgspec takes it, and with it `inspect`, `ast`, `dis` and `tokenize`: 10 ms and a
megabyte of an agent or hub. Since Python 3.11 `typing` has all that msgspec wants of it.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11) and not {"msgspec", "typing_extensions"} & sys.modules.keys():
    # Python's own word for a module that cannot be imported; msgspec does as where it is not installed.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]
