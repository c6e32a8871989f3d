"""What the driver tells of a run: its part of summary.json, and a line a step in metrics.jsonl."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunSummary:
    """Rewards, held-out accuracy and group counts of a run over all its attempts.

    Args:
        extra: what the newest commit holds of the attempts before (`to_extra`); empty in a fresh run.
    """

    def __init__(self, extra: Mapping[str, Any], step: int, counts: Mapping[str, Any]) -> None:
        reward, heldout = extra.get("reward") or {}, extra.get("heldout") or {}
        self._reward: dict[str, float | None] = {name: reward.get(name) for name in ("first", "last", "best")}
        self._heldout: dict[str, float | None] = {name: heldout.get(name) for name in ("first", "last")}
        self.step = step
        self.weight_version = 0
        self.counts = dict(counts)
        self.drained = ""
        """How the steps end when the run drained before the last one."""

    def on_step(self, step: int, reward: float) -> None:
        """A step is done."""
        best = self._reward["best"]
        self.step = step
        if self._reward["first"] is None:
            self._reward["first"] = reward
        self._reward["last"] = reward
        self._reward["best"] = reward if best is None else max(best, reward)

    def on_evaluation(self, accuracy: float) -> None:
        """A held-out evaluation is done."""
        if self._heldout["first"] is None:
            self._heldout["first"] = accuracy
        self._heldout["last"] = accuracy

    def to_extra(self) -> dict[str, Any]:
        """What a commit must hold, so that a resumed run goes on with this summary."""
        return {"reward": dict(self._reward), "heldout": dict(self._heldout)}

    def to_dict(self) -> dict[str, Any]:
        """The driver's part of summary.json."""
        groups = {"dispatched": 0, "committed": 0, "returned": 0, "dropped": {}} | self.counts
        return {
            "steps": self.step,
            "weight_version": self.weight_version,
            "reward": dict(self._reward),
            "heldout": dict(self._heldout),
            "groups": groups,
        }


class MetricsFile:
    """`<run_dir>/metrics.jsonl`: one object a step, appended as one line, so that readers never see half of one.

    A step that is done again after a rollback gets a second line; the later one counts.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line, whole or not at all. Raises OSError when the disk is full."""
        line = (json.dumps(row) + "\n").encode()
        with self._path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                file.truncate(before)
                raise
