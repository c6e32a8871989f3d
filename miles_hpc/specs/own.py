"""What the pools of our own programs have alike."""

from __future__ import annotations

from typing import Any, Literal

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec
from miles_hpc.specs.runtime import own_env, own_program
from miles_hpc.wire.messages import Probe

OwnPool = Literal["session-server", "controller", "rollout-worker", "executor", "trainer", "driver"]


def own_spec(config: Config, pool: OwnPool, module: str, **more: Any) -> CommandWorkerSpec:
    """A pool that runs `python -m module` in the runtime of its name.

    Args:
        more: fields of `CommandWorkerSpec`; they win over those that are set here.
    """
    fields: dict[str, Any] = {
        "name": pool,
        "category": pool,
        "runtime": pool,
        "launch_command": lambda ctx: own_program(config, pool, module),
        "env": lambda ctx: own_env(config, pool),
        "stop_grace": config.timing.stop_grace,
    }
    return CommandWorkerSpec(**{**fields, **more})


def timed_probe(
    config: Config,
    kind: Literal["tcp", "http"],
    port: str,
    *,
    path: str = "/health",
    start_deadline: float | None = None,
    counts: bool = False,
    silence: float = 0.0,
) -> Probe:
    """A probe with the times of `[timing]`.

    Args:
        start_deadline: seconds until the first success, where it is not that of `[timing]`.
        counts: the program counts the turns of its loop (`wire/serving.py`), and is stopped when they stop.
        silence: seconds that it may leave probes without an answer, where that is longer than the threshold's.
    """
    timing = config.timing
    return Probe(
        kind=kind,
        port=port,
        path=path,
        interval=timing.probe_interval,
        timeout=timing.probe_timeout,
        start_deadline=timing.start_deadline if start_deadline is None else start_deadline,
        stall=timing.stall if counts else 0.0,
        silence=silence,
    )
