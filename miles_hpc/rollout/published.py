"""Which weight versions the trainer has published."""

from __future__ import annotations

from pathlib import Path


class PublishedVersions:
    """Versions that the driver has named, and those whose claim lies in `<run_dir>/weights/`: engines may have taken a
    version before the driver says so here."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "weights"
        self._known: set[int] = set()

    def tell(self, version: int) -> None:
        """The driver names a version."""
        self._known.add(version)

    def contains(self, version: int) -> bool:
        """Whether tokens of this version may be trained on."""
        if version in self._known:
            return True
        if version < 1 or not (self._directory / f"{version:05d}.json").exists():
            return False
        self._known.add(version)
        return True
