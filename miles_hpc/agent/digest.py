"""What hub and agents must have read alike."""

from __future__ import annotations

from pathlib import Path

from miles_hpc import __version__
from miles_hpc.config.node import RESOLVED
from miles_hpc.wire.hashes import sha256


def run_digest(run_dir: Path) -> str:
    """Hash of the resolved config and the package version; the hub refuses an agent with another one.

    Raises:
        OSError: when the config cannot be read.
    """
    content = sha256((run_dir / RESOLVED).read_bytes())
    content.update(__version__.encode())
    return content.hexdigest()
