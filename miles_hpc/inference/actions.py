"""What the controller's decisions ask its hands to do."""

from __future__ import annotations

from dataclasses import dataclass

from miles_hpc.inference.windows import EngineInfo


@dataclass(frozen=True)
class Action:
    """What the shell is to do. Its outcome comes back as an event with the same cell and generation."""


@dataclass(frozen=True)
class AwaitHealth(Action):
    """Poll `/health` until 200, then `on_healthy`; past the start deadline `on_failed`."""

    engine: EngineInfo


@dataclass(frozen=True)
class LoadWeights(Action):
    """`update_weights_from_disk`, then `on_loaded` or `on_load_failed`."""

    engine: EngineInfo
    version: int
    path: str


@dataclass(frozen=True)
class Resume(Action):
    """Continue an engine that a dead window may have left paused, inside a session, with part of other weights; then
    `on_resumed` or, when it does not do all of that, `on_failed`."""

    engine: EngineInfo


@dataclass(frozen=True)
class SyncRouters(Action):
    """`wanted_urls` changed: bring every router's list in line at once."""


@dataclass(frozen=True)
class Replace(Action):
    """Ask the hub to replace this generation."""

    engine: EngineInfo
    reason: str


@dataclass(frozen=True)
class Forget(Action):
    """Cancel what still runs for this generation."""

    engine: EngineInfo
