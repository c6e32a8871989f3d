"""TensorBoard and W&B beside metrics.jsonl. A tracker that fails is switched off; it never fails a step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from miles_hpc.config.schema import Config

log = logging.getLogger(__name__)


class _Tracker(Protocol):
    name: str

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The trackers that a config asks for; none by default, and then this costs nothing.

    Args:
        config: its `tracking` table says which trackers are wanted.
        run_dir: TensorBoard events go to `<run_dir>/tensorboard`, offline W&B runs to `<run_dir>/wandb`.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._trackers: list[_Tracker] = []
        wanted: list[tuple[bool, str, Callable[[Config, Path], _Tracker]]] = [
            (config.tracking.tensorboard, "tensorboard", _TensorBoard),
            (bool(config.tracking.wandb_project), "wandb", _Wandb),
        ]
        for asked, name, make in wanted:
            if not asked:
                continue
            try:
                self._trackers.append(make(config, run_dir))
            except Exception as error:
                log.warning("no metrics go to %s: %s: %s", name, type(error).__name__, error)

    @property
    def names(self) -> list[str]:
        """Trackers that still work."""
        return [tracker.name for tracker in self._trackers]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send every number in `metrics` (nested tables as `table/key`); never raises."""
        if not self._trackers:
            return
        values = dict(numbers(metrics))
        for tracker in list(self._trackers):
            try:
                tracker.log(step, values)
            except Exception as error:
                log.warning("%s failed at step %d and is off: %s: %s", tracker.name, step, type(error).__name__, error)
                self._trackers.remove(tracker)

    def close(self) -> None:
        """Flush and end the trackers; never raises."""
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                tracker.close()
            except Exception as error:
                log.warning("%s did not close: %s: %s", tracker.name, type(error).__name__, error)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a nested table, as (`table/key`, value)."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, config: Config, run_dir: Path) -> None:
        # The event writer alone: torch.utils.tensorboard would import torch into the driver.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        import time

        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    name = "wandb"

    def __init__(self, config: Config, run_dir: Path) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=config.tracking.wandb_project,
            name=run_dir.name,
            id=run_dir.name,
            resume="allow",
            mode=config.tracking.wandb_mode,
            dir=str(run_dir),
            config=msgspec.to_builtins(config),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
