"""The trainer cell with all its ranks, and the driver that leads the loop."""

from __future__ import annotations

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import TRAINING_GROUP, CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.runtime import collective_env, own_env, own_program
from miles_hpc.wire.messages import PortInfo, Probe

TRAINER_POOL = "trainer"
DRIVER_POOL = "driver"


def trainer_spec(config: Config) -> CommandWorkerSpec:
    return CommandWorkerSpec(
        name=TRAINER_POOL,
        category="trainer",
        runtime="trainer",
        launch_command=lambda ctx: own_program(config, "trainer", "miles_hpc.train.run_trainer"),
        env=lambda ctx: {**collective_env(config, "trainer"), **own_env(config, "trainer", config.train.threads)},
        scheduling=SchedulingSpec(
            num_cells=0 if config.mode == "external" else 1,
            num_workers_per_cell=config.train.ranks,
            num_cpus_per_worker=float(config.train.threads),
            placement="pack",
            avoid_hub_node=True,
        ),
        port_infos=(PortInfo(name="rpc"), PortInfo(name="master", mode="master")),
        probe=Probe(
            kind="tcp",
            port="rpc",
            interval=config.timing.probe_interval,
            timeout=config.timing.probe_timeout,
            start_deadline=config.timing.start_deadline,
        ),
        group=TRAINING_GROUP,
        state="stateful",
        stop_grace=config.timing.trainer_stop_grace,
    )


def driver_spec(config: Config) -> CommandWorkerSpec:
    return CommandWorkerSpec(
        name=DRIVER_POOL,
        category="driver",
        runtime="driver",
        launch_command=lambda ctx: own_program(config, "driver", "miles_hpc.train.run_driver"),
        env=lambda ctx: own_env(config, "driver"),
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5, avoid_hub_node=True),
        port_infos=(PortInfo(name="rpc"),) if config.mode == "external" else (),
        group=TRAINING_GROUP,
        state="stateful",
        stop_grace=config.timing.stop_grace,
    )
