"""miles_hpc: LLM reinforcement-learning rollouts and training inside a Slurm allocation, with no Ray."""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing, which a warden has no other use for
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

# Name -> module that has it, imported when it is first asked for: programs of a run must not pay for it.
_LAZY = {
    "Run": "miles_hpc.launch.run",
    "State": "miles_hpc.launch.run",
    "connect": "miles_hpc.train.connect",
    "connect_async": "miles_hpc.train.connect",
    "submit": "miles_hpc.cli.submit",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
