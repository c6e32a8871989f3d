"""The inference controller: one process that owns readiness, router truth and weight windows."""

from __future__ import annotations

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.runtime import own_env, own_program
from miles_hpc.wire.messages import PortInfo, Probe

CONTROLLER_POOL = "controller"


def controller_spec(config: Config) -> CommandWorkerSpec:
    return CommandWorkerSpec(
        name=CONTROLLER_POOL,
        category="controller",
        runtime="controller",
        launch_command=lambda ctx: own_program(config, "controller", "miles_hpc.inference.run_controller"),
        env=lambda ctx: own_env(config, "controller"),
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5, avoid_hub_node=True),
        port_infos=(PortInfo(name="rpc"),),
        probe=Probe(
            kind="tcp",
            port="rpc",
            interval=config.timing.probe_interval,
            timeout=config.timing.probe_timeout,
            start_deadline=config.timing.start_deadline,
        ),
        state="stateful",
        stop_grace=config.timing.stop_grace,
    )
