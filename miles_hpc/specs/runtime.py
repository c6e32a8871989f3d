"""The interpreter and environment of a pool's workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from miles_hpc.config.schema import Config, RuntimeConfig

# Small processes on many-core nodes: without these every numpy, torch or glibc pool grows with the core count.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
}
# Models are local directories by the time a worker starts; compute nodes often have no route to the model hub.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Traffic inside a run never meets a site's proxy. The router's client ignores `NO_PROXY=*` and obeys an empty value.
_NO_PROXY = {name: "" for word in ("http", "https", "all") for name in (f"{word}_proxy", f"{word}_PROXY".upper())}


# SGLang forces the first; a trainer that shares a group with its engines and differs crashes NCCL.
_COLLECTIVE = {"NCCL_CUMEM_ENABLE": "0", "NVSHMEM_DISABLE_NCCL": "1"}
COLLECTIVE_PREFIXES = ("NCCL_", "NVSHMEM_", "GLOO_", "TORCH_NCCL_")
"""Variables that trainer and engines must agree on."""


def collective_env(config: Config, kind: str) -> dict[str, str]:
    """What trainer and engines set alike for their collectives; a runtime's own values win (`check` compares them)."""
    given = runtime_of(config, kind).env
    return {**_COLLECTIVE, **{name: value for name, value in given.items() if name.startswith(COLLECTIVE_PREFIXES)}}


def runtime_of(config: Config, kind: str) -> RuntimeConfig:
    """`[runtimes.<kind>]`, else `[runtimes.default]`, else this interpreter's."""
    return config.runtimes.get(kind) or config.runtimes.get("default") or RuntimeConfig()


def python_of(config: Config, kind: str) -> str:
    """The interpreter of a kind of pool; a bare name is looked up in PATH."""
    python = runtime_of(config, kind).python
    if not python:
        return sys.executable
    return python if os.sep in python else _in_path(python) or python


def _in_path(name: str) -> str:
    """As `shutil.which`, which brings the hub three libraries for archives."""
    found = (Path(place) / name for place in os.get_exec_path())
    return next((str(path) for path in found if path.is_file() and os.access(path, os.X_OK)), "")


def own_program(config: Config, kind: str, module: str, *arguments: str) -> list[str]:
    """Argument list of a program of ours."""
    return [python_of(config, kind), "-m", module, *arguments]


def own_env(config: Config, kind: str, threads: int = 1) -> dict[str, str]:
    """Environment of a program of ours; what `[runtimes.<kind>].env` says wins."""
    env = {**_ONE_THREAD, **_OFFLINE}
    if threads > 1:
        env |= {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    given = runtime_of(config, kind).env
    paths = [*config.python_path, *filter(None, [given.get("PYTHONPATH") or os.environ.get("PYTHONPATH")])]
    env |= given
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def foreign_env(config: Config, kind: str) -> dict[str, str]:
    """Environment of a program of someone else."""
    return {**_NO_PROXY, **_OFFLINE, **runtime_of(config, kind).env}
