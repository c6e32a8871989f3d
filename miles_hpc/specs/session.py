"""Session servers: independent instances, each a cell of its own."""

from __future__ import annotations

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, SchedulingSpec
from miles_hpc.specs.runtime import own_env, own_program
from miles_hpc.wire.messages import PortInfo, Probe

SESSION_POOL = "session-server"


def session_spec(config: Config) -> CommandWorkerSpec:
    fixed = config.session.port
    return CommandWorkerSpec(
        name=SESSION_POOL,
        category="session-server",
        runtime="session-server",
        launch_command=lambda ctx: own_program(config, "session-server", "miles_hpc.session.serve"),
        env=lambda ctx: own_env(config, "session-server"),
        scheduling=SchedulingSpec(num_cells=config.session.servers, num_cpus_per_worker=0.5),
        port_infos=(PortInfo(name="http", static_port=fixed, allow_dynamic=not fixed, offset_by_cell=bool(fixed)),),
        probe=Probe(
            kind="http",
            port="http",
            path="/health",
            interval=config.timing.probe_interval,
            timeout=config.timing.probe_timeout,
            start_deadline=config.timing.start_deadline,
        ),
        stop_grace=config.timing.stop_grace,
        meta=lambda cell_index: {"instance": cell_index},
    )
