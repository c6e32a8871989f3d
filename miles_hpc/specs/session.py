"""Session servers: independent instances, each a cell of its own."""

from __future__ import annotations

from typing import Final

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.own import own_spec, timed_probe
from miles_hpc.wire.messages import PortInfo

SESSION_POOL: Final = "session-server"


def session_spec(config: Config) -> CommandWorkerSpec:
    fixed = config.session.port
    return own_spec(
        config,
        SESSION_POOL,
        "miles_hpc.session.serve",
        scheduling=SchedulingSpec(num_cells=config.session.servers, num_cpus_per_worker=0.5),
        port_infos=(PortInfo(name="http", static_port=fixed, allow_dynamic=not fixed, offset_by_cell=bool(fixed)),),
        probe=timed_probe(config, "http", "http", counts=True),
        meta=lambda cell_index: {"instance": cell_index},
    )
