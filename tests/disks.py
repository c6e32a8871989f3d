"""File systems for tests that are full, or that stand still. Need root."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from pathlib import Path

import pytest


class FrozenDisk:
    """An ext4 on a loop device at `path`; `freeze` stops everything that writes to it, in the kernel, for some time.

    Skips the test where that cannot be made.
    """

    def __init__(self, tmp_path: Path, mebibytes: int = 16) -> None:
        self.path, image = tmp_path / "disk", tmp_path / "image"
        self.path.mkdir()
        self._thawing: list[threading.Timer] = []
        with image.open("wb") as file:
            file.truncate(mebibytes << 20)
        made = subprocess.run(["mkfs.ext4", "-q", str(image)], check=False).returncode == 0
        mount = ["mount", "-o", "loop", str(image), str(self.path)]
        if not made or subprocess.run(mount, check=False).returncode != 0:
            pytest.skip("loop devices need root")

    def freeze(self, seconds: float) -> None:
        """Thawed by time, whatever the test does: a process that waits for a frozen file system cannot be killed."""
        self._thawing.append(threading.Timer(seconds, self.thaw))
        self._thawing[-1].start()
        subprocess.run(["fsfreeze", "-f", str(self.path)], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.path)], check=False, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        self.thaw()
        for timer in self._thawing:
            timer.cancel()
        subprocess.run(["umount", "-l", str(self.path)], check=True)


class SmallDisk:
    """A tmpfs of a few MiB at `path`, that can be filled to the last byte. Skips the test where that cannot be made."""

    def __init__(self, tmp_path: Path, mebibytes: int) -> None:
        self.path = tmp_path / "small"
        self.path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(self.path)]
        if subprocess.run(mount, check=False).returncode != 0:
            pytest.skip("mounting needs root")

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / "full").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    def make_room(self) -> None:
        (self.path / "full").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)
