"""Which weights are published, kept for the next controller of the attempt: nothing else of a window outlives one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from miles_hpc.inference.controller import Published

log = logging.getLogger(__name__)


class _Record(msgspec.Struct, frozen=True):
    attempt: int
    version: int
    path: str


class PublishedFile:
    """`<run_dir>/weights/published.json`, replaced as a whole; a record of another attempt says nothing.

    Args:
        model: name of a model beside the policy, which has a file of its own.
    """

    def __init__(self, run_dir: Path, attempt: int, model: str = "") -> None:
        self._path = run_dir / "weights" / (f"published-{model}.json" if model else "published.json")
        self._attempt = attempt

    def read(self) -> Published | None:
        """What an earlier controller of this attempt wrote, if the weights are still there."""
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s is not readable, so engines wait for the next window: %s", self._path, error)
            return None
        if record.attempt != self._attempt or (record.path and not Path(record.path).is_dir()):
            return None
        return Published(record.version, record.path)

    def write(self, published: Published) -> None:
        """Replace the record; one that cannot be written costs a later controller a window, not this one anything."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        record = _Record(self._attempt, published.version, published.path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(record))
            draft.replace(self._path)
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error)
