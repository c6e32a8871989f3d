"""Turns a spec and the address book into the order that starts a worker."""

from __future__ import annotations

import json
from collections.abc import Mapping

from miles_hpc.hub.core import Cell, Core, Worker
from miles_hpc.specs.base import LaunchCommandContext
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import CellAddrs, PortInfo, StartWorker

Ports = dict[str, HostAndPort]


def ports_of_worker(cell: Cell, worker_index: int) -> list[PortInfo]:
    """What a worker reserves: its own ports, and the cell's master ports when it is the first."""
    return [port for port in cell.spec.port_infos if port.mode == "per_worker" or worker_index == 0]


def own_addrs(core: Core, worker: Worker) -> Ports:
    """The ports that a worker itself listens on."""
    host = core.nodes[worker.node].address
    return {name: HostAndPort(host, port) for name, port in (worker.ports or {}).items()}


def master_addrs(core: Core, cell: Cell) -> Ports:
    """The cell's master ports, which its first worker listens on."""
    own = own_addrs(core, cell.workers[0])
    return {port.name: own[port.name] for port in cell.spec.port_infos if port.mode == "master"}


def cell_addrs(core: Core, cell: Cell) -> tuple[Ports, ...]:
    """For each worker its own ports and the cell's master ports."""
    master = master_addrs(core, cell)
    return tuple({**master, **own_addrs(core, worker)} for worker in cell.workers)


def start_order(core: Core, cell: Cell, worker: Worker) -> StartWorker:
    """The command, environment and probe of one worker.

    Raises:
        Exception: whatever the spec's `launch_command` or `env` raises.
    """
    spec, node = cell.spec, core.nodes[worker.node]
    own, master = own_addrs(core, worker), master_addrs(core, cell)
    addrs = cell_addrs(core, cell)
    context = LaunchCommandContext(
        cell_index=cell.index,
        worker_index=worker.index,
        local_gpu_ids=tuple(node.gpus[slot].index for slot in worker.gpu_slots),
        self_addrs={**master, **own},
        cell_addrs=addrs,
        pool_addrs={
            pool: tuple(cell_addrs(core, other) for other in cells if other.published)
            for pool, cells in core.pools.items()
        },
        run_dir=core.info.run_dir,
        attempt=core.info.attempt,
    )
    argv = [str(part) for part in spec.launch_command(context)]
    identity = {
        "MILES_HPC_RUN_DIR": core.info.run_dir,
        "MILES_HPC_ATTEMPT": str(core.info.attempt),
        "MILES_HPC_WORKER": worker.id,
        "MILES_HPC_GENERATION": str(cell.generation),
        "MILES_HPC_NODE": worker.node,
        "MILES_HPC_LISTEN": _as_json(own),
        "MILES_HPC_MASTER": _as_json(own_addrs(core, cell.workers[0])),
        "MILES_HPC_CELL_SIZE": str(len(cell.workers)),
        "PYTHONUNBUFFERED": "1",
    }
    return StartWorker(
        worker=worker.id,
        generation=cell.generation,
        argv=argv,
        # Identity last: a user's environment may add variables, never take a worker's name away.
        env={**{key: str(value) for key, value in spec.env(context).items()}, **identity},
        ports=worker.ports or {},
        probe=spec.probe,
        stop_grace=spec.stop_grace,
        gpu_uuids=[node.gpus[slot].uuid for slot in worker.gpu_slots],
        stateful=spec.state == "stateful",
        farewell=list(spec.farewell),
        essential_processes=list(spec.essential_processes),
    )


def _as_json(addrs: Mapping[str, HostAndPort]) -> str:
    return json.dumps({name: address.netloc for name, address in addrs.items()}, sort_keys=True)


def address_book(core: Core) -> dict[str, list[CellAddrs]]:
    """Pool id -> published cells in cell order; a pool without a living cell has an empty list."""
    return {
        pool: [
            CellAddrs(
                cell=cell.id,
                generation=cell.generation,
                node=cell.workers[0].node,
                ready=cell.phase.value == "ready",
                workers=list(cell_addrs(core, cell)),
                meta=cell.spec.meta(cell.index),
            )
            for cell in cells
            if cell.published
        ]
        for pool, cells in core.pools.items()
    }
