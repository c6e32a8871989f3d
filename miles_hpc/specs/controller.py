"""The inference controller: one process that owns readiness, router truth and weight windows."""

from __future__ import annotations

from typing import Final

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.own import own_spec, timed_probe
from miles_hpc.wire.messages import PortInfo

CONTROLLER_POOL: Final = "controller"


def controller_spec(config: Config) -> CommandWorkerSpec:
    return own_spec(
        config,
        CONTROLLER_POOL,
        "miles_hpc.inference.run_controller",
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5, avoid_hub_node=True),
        port_infos=(PortInfo(name="rpc"),),
        probe=timed_probe(config, "tcp", "rpc", counts=True),
        state="stateful",
    )
