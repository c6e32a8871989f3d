"""Functions of the user, named as `module:function` in the run file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class FunctionPathError(ValueError):
    """A dotted path that does not lead to a function; one line with key, path and remedy."""


def load_function(path: str, key: str) -> Callable[..., Any]:
    """Import `module:function` (or `module:object.method`).

    Args:
        key: of the run file, for the error text.

    Raises:
        FunctionPathError: the path has another form, does not import, or leads to something that cannot be called.
    """
    module_name, colon, names = path.partition(":")
    if not colon or not module_name or not names:
        raise FunctionPathError(f"{key} = {path!r} is not module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise FunctionPathError(
            f"{key} = {path!r}: importing {module_name} failed: {type(error).__name__}: {error}; correct the "
            f"path, or put the module's directory on PYTHONPATH"
        ) from error
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise FunctionPathError(f"{key} = {path!r}: {module_name} has no {names!r}; correct the name") from error
    if not callable(found):
        raise FunctionPathError(f"{key} = {path!r} is {type(found).__name__}; expected a function")
    function: Callable[..., Any] = found
    return function
