"""Rollout workers, and the executor that hands out prompts and collects finished groups."""

from __future__ import annotations

from typing import Final

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.own import own_spec, timed_probe
from miles_hpc.wire.messages import PortInfo

ROLLOUT_WORKER_POOL: Final = "rollout-worker"
EXECUTOR_POOL: Final = "executor"


def rollout_worker_spec(config: Config) -> CommandWorkerSpec:
    return own_spec(
        config,
        ROLLOUT_WORKER_POOL,
        "miles_hpc.rollout.run_worker",
        scheduling=SchedulingSpec(num_cells=config.rollout.workers, num_cpus_per_worker=0.5),
        port_infos=(PortInfo(name="bulk"),),
    )


def executor_spec(config: Config) -> CommandWorkerSpec:
    return own_spec(
        config,
        EXECUTOR_POOL,
        "miles_hpc.rollout.run_executor",
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5, avoid_hub_node=True),
        port_infos=(PortInfo(name="rpc"), PortInfo(name="work"), PortInfo(name="bulk")),
        probe=timed_probe(config, "tcp", "rpc", counts=True),
        state="stateful",
    )
