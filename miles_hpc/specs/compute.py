"""From a config to the pools of a run: the single way in."""

from __future__ import annotations

from pathlib import Path

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec
from miles_hpc.specs.controller import controller_spec
from miles_hpc.specs.engine import engine_specs
from miles_hpc.specs.rollout import executor_spec, rollout_worker_spec
from miles_hpc.specs.router import router_specs
from miles_hpc.specs.session import session_spec
from miles_hpc.specs.train import driver_spec, trainer_spec


def compute_specs(config: Config, run_dir: str | Path) -> list[CommandWorkerSpec]:
    """All pools of a run, in the order in which they are placed. A pool without cells is left out; a run that trains on
    saved rollouts asks no engine, so it has none, nor anything around them.

    Raises:
        ValueError: when two pools would get one name.
    """
    asking = [
        *router_specs(config),
        session_spec(config),
        *engine_specs(config),
        controller_spec(config),
        rollout_worker_spec(config),
    ]
    specs = [
        *([] if config.rollout.load_debug else asking),
        executor_spec(config),
        trainer_spec(config),
        driver_spec(config),
    ]
    specs = [spec for spec in specs if spec.scheduling.num_cells]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two pools are called {twice[0]!r}: change model.name")
    return specs
