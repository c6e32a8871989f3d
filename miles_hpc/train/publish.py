"""Weight versions: numbers claimed once per run, directories that appear whole, a window in which engines load them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_hpc.rollout.commits import link_once
from miles_hpc.train.trainer import sync_file

if TYPE_CHECKING:
    from miles_hpc.inference.weights import UpdateResult
    from miles_hpc.inference.windows import ControllerStatus, EngineInfo, Window

log = logging.getLogger(__name__)

KEEP = 2
"""Newest versions that are always kept: engines serve one and load the next."""
WIDTH = 5
TRIES = 3
"""Windows in which a version is tried, when the controller or the window gets lost."""


class Controller(Protocol):
    """What publishing needs of a ControllerClient."""

    async def start_update_weights(self, timeout_s: float) -> Window: ...

    async def end_update_weights(
        self, window_id: str, version: int, path: str, failed: dict[str, str] | None = None
    ) -> dict[str, str]: ...

    async def abort_update_weights(self, window_id: str, reason: str) -> None: ...

    async def status(self) -> ControllerStatus: ...


Load = Callable[["Sequence[EngineInfo]", str, int], "Awaitable[UpdateResult]"]
"""Brings a directory into engines as a version; `inference.weights.update_from_disk` with a pause mode."""


class WeightPublisher:
    """Publishes the trainer's weights to the engines.

    Args:
        run_dir: versions lie in `<run_dir>/weights/`.
        identity: goes into each claim, for people.
        controller: of the engines; None where there are none, as when saved rollouts are trained on: then versions are
            numbers that nothing serves.
        export: writes an HF directory at the path it is given.
        window_timeout_s: until a window must have begun.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: dict[str, Any],
        controller: Controller | None,
        export: Callable[[Path], Awaitable[None]],
        load: Load,
        window_timeout_s: float,
    ) -> None:
        self._directory = run_dir / "weights"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._identity = identity
        self._controller = controller
        self._export = export
        self._load = load
        self._window_timeout_s = window_timeout_s
        self._latest = 0

    def claim(self, above: int) -> int:
        """The next free version number above `above`, now this run's for good.

        A number is the name of a file that link(2) made, so no two drivers get the same, and none is ever given again.
        """
        version = max(above, self._latest) + 1
        record = json.dumps({**self._identity, "wall_s": time.time()}).encode() + b"\n"
        while not link_once(self._directory / f"{version:0{WIDTH}d}.json", record):
            version += 1
        self._latest = version
        return version

    def path_of(self, version: int) -> Path:
        """Directory of a version."""
        return self._directory / f"{version:0{WIDTH}d}"

    async def publish(self, above: int) -> int:
        """Give the trainer's weights a number, write them, and bring them into all engines.

        Args:
            above: highest version that the commit log knows.

        Returns:
            The version.

        Raises:
            WindowTimeout: no window could begin in time.
            WeightsNotTaken: every engine refused.
            WindowLost, RpcError, BroadcastBroke: windows were lost `TRIES` times in a row: with the controller, with an
                engine in the middle of a broadcast, or before their end.
        """
        version = self.claim(above)
        if self._controller is None:
            return version
        path = self.path_of(version)
        draft = self._directory / f".{path.name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        await self._export(draft)
        draft.rename(path)
        sync_file(self._directory)
        failed = await self._in_a_window(self._controller, version, path)
        if failed:
            log.warning("weights %d: %d engines are replaced: %s", version, len(failed), failed)
        await self._remove_old(self._controller)
        return version

    async def _in_a_window(self, controller: Controller, version: int, path: Path) -> dict[str, str]:
        """Bring a version into all engines. Returns those that did not take it.

        A controller that dies takes its window along, and the next one knows nothing of it; an engine that dies in a
        broadcast takes the others along. The same weights go into a new window then, and engines that have them already
        load them again.
        """
        from miles_hpc.inference.broadcast import BroadcastBroke
        from miles_hpc.inference.windows import WindowLost
        from miles_hpc.wire.rpc import RpcTimeout, RpcUnreachable

        for tries_left in reversed(range(TRIES)):
            try:
                return await self._in_one_window(controller, version, path)
            except (WindowLost, RpcTimeout, RpcUnreachable, BroadcastBroke) as error:
                if not tries_left:
                    raise
                log.warning("weights %d: the window was lost, another one is asked for: %s", version, error)
        raise AssertionError("the last try returns or raises")

    async def _in_one_window(self, controller: Controller, version: int, path: Path) -> dict[str, str]:
        window = await controller.start_update_weights(self._window_timeout_s)
        try:
            outcome = await self._load(window.engines, str(path), version)
            return await controller.end_update_weights(window.window_id, version, str(path), outcome.failed)
        except BaseException as error:
            await self._give_up(controller, window.window_id, f"{type(error).__name__}: {error}")
            raise

    async def _give_up(self, controller: Controller, window_id: str, reason: str) -> None:
        try:
            await controller.abort_update_weights(window_id, reason)
        except Exception as error:
            # The window's own deadline ends it; what is raised to the caller is the first failure.
            log.warning("window %s could not be aborted: %s", window_id, error)

    async def _remove_old(self, controller: Controller) -> None:
        """Remove versions that no engine serves or may still load."""
        status = await controller.status()
        serving = [engine.weight_version for engine in status.engines]
        for version, path in self.versions()[:-KEEP]:
            # An engine without a version (-1) is loading one right now.
            if all(at > version for at in serving):
                # Renamed first: a directory under a version's name is always whole.
                gone = path.with_name(f".{path.name}.{os.urandom(4).hex()}.gone")
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def versions(self) -> list[tuple[int, Path]]:
        """Versions on disk, lowest first."""
        return sorted((int(path.name), path) for path in self._directory.glob("[0-9]*") if path.is_dir())
