"""Temporary directories of workers: short paths on a local disk, removed when the worker is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "xdg",
}


class ScratchError(Exception):
    """No directory can be used; the text names those that were tried and why each was refused."""


class Scratch:
    """The scratch directory of one agent, with one directory per worker and compile caches that they share.

    Args:
        name: of the directory, unique on this machine (`place.place_name`).
        environ: read for SLURM_TMPDIR and TMPDIR, and for what the user set himself.
        wanted: the directory that the run file names, tried first.
    """

    def __init__(self, name: str, environ: Mapping[str, str], wanted: str = "") -> None:
        self._environ = environ
        base = choose_base([wanted, environ.get("SLURM_TMPDIR", ""), environ.get("TMPDIR", ""), "/tmp", "/dev/shm"])
        self.name = name
        self.root = base / name
        self.root.mkdir(mode=0o700, exist_ok=True)
        if self.root.stat().st_uid != os.getuid():
            raise ScratchError(f"{self.root} belongs to another user: remove it, or set TMPDIR to a directory of yours")
        self._count = 0

    def make(self) -> Path:
        """A fresh directory for a worker."""
        self._count += 1
        path = self.root / f"w{self._count}"
        # Left by an agent incarnation that was killed.
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        return path

    def variables(self, directory: Path) -> dict[str, str]:
        """Environment that sends temporary files to `directory` and caches of compiled code to the node's scratch."""
        values = {"TMPDIR": str(directory)}
        for name, folder in _CACHES.items():
            if name not in self._environ:
                values[name] = str(self.root / folder)
        if "HF_HOME" not in self._environ and "XDG_CACHE_HOME" in values:
            # Models that were downloaded before the run lie in the user's cache, wherever XDG_CACHE_HOME now points.
            values["HF_HOME"] = str(Path("~/.cache/huggingface").expanduser())
        return values

    @staticmethod
    def remove(directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        self.remove(self.root)


def choose_base(candidates: Sequence[str]) -> Path:
    """The first directory that can be written and executed from.

    Raises:
        ScratchError: when there is none.
    """
    reasons = []
    for name in dict.fromkeys(filter(None, candidates)):
        reason = _unusable(name)
        if not reason:
            return Path(name)
        reasons.append(f"{name} ({reason})")
    raise ScratchError(f"no usable temporary directory among {', '.join(reasons)}: set TMPDIR")


def _unusable(name: str) -> str:
    try:
        if os.statvfs(name).f_flag & os.ST_NOEXEC:
            return "mounted noexec"
        descriptor, path = tempfile.mkstemp(dir=name, prefix="mh-")
    except OSError as error:
        return error.strerror or str(error)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        Path(path).unlink()
    return ""
