"""What a run has written so far, read without a lock while it is still being written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Tail:
    """Reads the complete lines that were added to a JSON-lines file since the last call.

    A line that is not finished yet stays for the next call; one that is not JSON is left out. A file that became
    shorter was replaced and is read from its start.
    """

    path: Path
    _offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def read(self) -> list[dict[str, Any]]:
        """The new objects, oldest first; empty when there is no file yet."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [row for row in map(_decoded, lines) if row is not None]

    def skip_to_end(self) -> None:
        """Leave out what is there now: the lines of earlier attempts."""
        self.read()


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when it is missing or not one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
