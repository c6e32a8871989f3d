"""Rollout workers, and the executor that hands out prompts and collects finished groups."""

from __future__ import annotations

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import TRAINING_GROUP, CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.runtime import own_env, own_program
from miles_hpc.wire.messages import PortInfo, Probe

ROLLOUT_WORKER_POOL = "rollout-worker"
EXECUTOR_POOL = "executor"


def rollout_worker_spec(config: Config) -> CommandWorkerSpec:
    return CommandWorkerSpec(
        name=ROLLOUT_WORKER_POOL,
        category="rollout-worker",
        runtime="rollout-worker",
        launch_command=lambda ctx: own_program(config, "rollout-worker", "miles_hpc.rollout.run_worker"),
        env=lambda ctx: own_env(config, "rollout-worker"),
        scheduling=SchedulingSpec(num_cells=config.rollout.workers, num_cpus_per_worker=0.5),
        stop_grace=config.timing.stop_grace,
    )


def executor_spec(config: Config) -> CommandWorkerSpec:
    return CommandWorkerSpec(
        name=EXECUTOR_POOL,
        category="executor",
        runtime="executor",
        launch_command=lambda ctx: own_program(config, "executor", "miles_hpc.rollout.run_executor"),
        env=lambda ctx: own_env(config, "executor"),
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5, avoid_hub_node=True),
        port_infos=(PortInfo(name="rpc"), PortInfo(name="work"), PortInfo(name="bulk")),
        probe=Probe(
            kind="tcp",
            port="rpc",
            interval=config.timing.probe_interval,
            timeout=config.timing.probe_timeout,
            start_deadline=config.timing.start_deadline,
        ),
        group=TRAINING_GROUP,
        state="stateful",
        stop_grace=config.timing.stop_grace,
    )
