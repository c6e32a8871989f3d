"""env.json: what a run was started with, for whoever reads the directory later. No secrets: only named variables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from miles_hpc import __version__

_PACKAGES = (
    "aiohttp",
    "msgspec",
    "numpy",
    "pyzmq",
    "sglang",
    "sglang-router",
    "tokenizers",
    "torch",
    "transformers",
)
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
_PREFIXES = ("SLURM_JOB_", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_RESTART_COUNT", "OMP_", "NCCL_")


def write_environment(run_dir: Path, argv: list[str]) -> Path:
    """Write `env.json`, replaced as one file."""
    target = run_dir / "env.json"
    temporary = run_dir / f".env.json.{os.getpid()}"
    temporary.write_text(json.dumps(environment(argv), indent=2) + "\n", encoding="utf-8")
    temporary.replace(target)
    return target


def environment(argv: list[str]) -> dict[str, Any]:
    """Versions, machine, command and the variables that change how programs run."""
    return {
        "miles_hpc": __version__,
        "command": argv,
        "directory": str(Path.cwd()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": sys.version.split()[0],
        "interpreter": sys.executable,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
