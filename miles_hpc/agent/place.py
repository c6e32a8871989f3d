"""The name of what a node keeps on its machine. Standard library only: the warden knows it too."""

from __future__ import annotations

import os

from miles_hpc.wire.hashes import blake2b


def place_name(run_dir: str, attempt: int, node: str) -> str:
    """Of the scratch directory and the control groups of a node; unique on its machine.

    Short: a unix socket's path, which programs like to put into their scratch directory, holds 107 bytes.
    """
    digest = blake2b(f"{run_dir}/{attempt}/{node}".encode(), digest_size=5).hexdigest()
    return f"mh{os.getuid()}-{digest}"
