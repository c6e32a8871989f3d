"""The trainer cell with all its ranks, and the driver that leads the loop."""

from __future__ import annotations

from typing import Final

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import TRAINING_GROUP, CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.own import own_spec, timed_probe
from miles_hpc.specs.runtime import collective_env, own_env
from miles_hpc.wire.messages import PortInfo

TRAINER_POOL: Final = "trainer"
DRIVER_POOL: Final = "driver"


def trainer_spec(config: Config) -> CommandWorkerSpec:
    return own_spec(
        config,
        TRAINER_POOL,
        "miles_hpc.train.run_trainer",
        env=lambda ctx: {**collective_env(config, "trainer"), **own_env(config, "trainer", config.train.threads)},
        scheduling=SchedulingSpec(
            num_cells=1 if config.mode in ("sync", "async") else 0,
            num_workers_per_cell=config.train.ranks,
            num_cpus_per_worker=float(config.train.threads),
            placement="pack",
            avoid_hub_node=True,
        ),
        port_infos=(PortInfo(name="rpc"), PortInfo(name="master", mode="master")),
        probe=timed_probe(config, "tcp", "rpc"),
        group=TRAINING_GROUP,
        state="stateful",
        stop_grace=config.timing.trainer_stop_grace,
    )


def driver_spec(config: Config) -> CommandWorkerSpec:
    return own_spec(
        config,
        DRIVER_POOL,
        "miles_hpc.train.run_driver",
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5, avoid_hub_node=True),
        port_infos=(PortInfo(name="rpc"),) if config.mode == "external" else (),
        group=TRAINING_GROUP,
        state="stateful",
    )
