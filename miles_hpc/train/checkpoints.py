"""Checkpoint directories: each path is written once; old ones go when newer commits exist."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


def new_checkpoint(run_dir: Path, step: int, generation: str) -> Path:
    """Make the directory of a checkpoint that the trainer of this generation writes.

    Attempts of one run may reach a step again with the same generation; then a suffix keeps the paths apart.
    """
    parent = run_dir / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    name, number = f"{step:05d}.g{generation}", 1
    path = parent / name
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{name}.{number}"


def remove_old_checkpoints(run_dir: Path, keep: Iterable[str]) -> None:
    """Remove every checkpoint but those in `keep`, which are paths relative to the run directory."""
    kept = set(keep)
    for path in sorted((run_dir / "checkpoints").glob("[0-9]*")):
        if path.is_dir() and str(path.relative_to(run_dir)) not in kept:
            gone = path.with_name(f".{path.name}.{os.urandom(4).hex()}.gone")
            try:
                path.rename(gone)
                shutil.rmtree(gone)
            except OSError as error:
                log.warning("the old checkpoint %s could not be removed: %s", path, error)
