"""`miles-hpc hub`: the hub of an attempt, with the site that its nodes come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import miles_hpc.wire.lean  # noqa: F401

# isort: split
from miles_hpc.config.schema import Config
from miles_hpc.hub import run
from miles_hpc.hub.site import Site


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hub. Returns its exit code."""
    return run.main(argv, _slurm)


def _slurm(run_dir: Path, attempt: int, config: Config) -> Site:
    from miles_hpc.launch.slurm_site import SlurmSite

    return SlurmSite(run_dir, attempt, config.slurm)


if __name__ == "__main__":
    sys.exit(main())
