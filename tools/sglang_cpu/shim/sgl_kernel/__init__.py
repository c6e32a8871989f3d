"""A shim of ours in the place of SGLang's kernel package, for tests on a CPU and for nothing else.

The kernel package on PyPI is a CUDA build, and SGLang imports a few names of it at load even on a CPU. Each name
resolves here and raises when it is called; without speculative decoding none is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} was called: this is the CPU shim of the tests, it has no kernels")

    return kernel
