"""What a run would start, and where: the hub's own state machine, driven with agents on paper."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.config.load import to_toml
from miles_hpc.config.schema import Config
from miles_hpc.hub.actions import Received, Send, Tick, WriteVerdict
from miles_hpc.hub.core import RunInfo
from miles_hpc.hub.state import HubState
from miles_hpc.specs.compute import compute_specs
from miles_hpc.wire.ids import node_id
from miles_hpc.wire.messages import (
    AgentHello,
    Gpu,
    PortsReserved,
    ReservePorts,
    StartWorker,
    WorkerReady,
    WorkerStarted,
)

_FIRST_PAPER_PORT = 1
_OWN_VARIABLES = "MILES_HPC_"


@dataclass(frozen=True)
class Planned:
    """One worker as the hub would order it. Ports that are chosen at start are shown by name."""

    node: str
    address: str
    worker: str
    command: str
    env: dict[str, str]


class NotPlaceable(Exception):
    """The cells of this config do not fit the nodes; the text has the numbers."""


@dataclass(frozen=True)
class PaperNodes:
    """The nodes to plan for. `cpus` and `gpus` are those of each node."""

    count: int
    cpus: float
    gpus: list[list[Gpu]]

    @classmethod
    def here(cls, config: Config, gpus: list[Gpu]) -> PaperNodes:
        """The nodes of a run on this machine, which share its CPUs; the first one has its GPUs."""
        nodes = config.cluster.local_nodes
        return cls(nodes, len(os.sched_getaffinity(0)) / nodes, [gpus, *([] for _ in range(nodes - 1))])

    @classmethod
    def of_job(cls, config: Config) -> PaperNodes:
        """The nodes that `[slurm]` asks for; whole nodes are taken to have CPUs enough."""
        slurm = config.slurm
        gpus = [Gpu(uuid=f"GPU-{index}", index=index) for index in range(slurm.gpus_per_node)]
        return cls(slurm.nodes, float(slurm.cpus_per_node or 4096), [gpus] * slurm.nodes)


def plan(config: Config, run_dir: Path, on: PaperNodes | None = None) -> list[Planned]:
    """Place every cell and render every command; nothing is started and no file is touched.

    Args:
        on: default: this machine, as if it had no GPUs.

    Raises:
        NotPlaceable: when the hub would end the run because a cell fits nowhere.
    """
    on = on or PaperNodes.here(config, [])
    info = RunInfo(
        run_id=run_dir.name,
        attempt=0,
        epoch=1,
        run_dir=str(run_dir),
        expected_nodes=on.count,
        spare_nodes=config.cluster.spare_nodes,
        hub_node=node_id(0),
        package_version="",
        digest="",
        hub="dry-run",
    )
    state = HubState(compute_specs(config, run_dir), info, config.heal, config.timing, 0.0)
    return list(_drive(state, _hellos(on)))


def _hellos(on: PaperNodes) -> Iterator[Received]:
    for index in range(on.count):
        hello = AgentHello(
            incarnation=f"paper-{index}",
            node_index=index,
            node_key=f"paper-{index}",
            host="this machine",
            pid=0,
            address=f"127.0.0.{index + 2}",
            package_version="",
            digest="",
            cpus=on.cpus,
            gpus=on.gpus[index],
        )
        yield Received(str(index).encode(), hello)


def _drive(state: HubState, events: Iterator[Received]) -> Iterator[Planned]:
    """Answer the hub's orders as agents would, until it asks for nothing more."""
    waiting: list[Received | Tick] = [*events, Tick()]
    now = 0.0
    next_port = _FIRST_PAPER_PORT
    names: dict[int, str] = {}
    while waiting:
        now += 0.001
        for action in state.apply(waiting.pop(0), now):
            if isinstance(action, WriteVerdict):
                raise NotPlaceable(action.reason)
            if not isinstance(action, Send):
                continue
            order, peer = action.message, action.peer
            if isinstance(order, ReservePorts):
                ports: dict[str, int] = {}
                for port in order.ports:
                    number = port.static_port + (order.cell_index if port.offset_by_cell else 0)
                    if not number:
                        number, next_port = next_port, next_port + 1
                        names[number] = f"{{{order.worker}:{port.name}}}"
                    ports[port.name] = number
                answer = PortsReserved(worker=order.worker, generation=order.generation, ports=ports)
                waiting.append(Received(peer, answer))
            elif isinstance(order, StartWorker):
                node = state.core.nodes[state.core.node_of_peer[peer]]
                yield Planned(node.id, node.address, order.worker, _shown(order.argv, names), _env(order.env))
                same = {"worker": order.worker, "generation": order.generation}
                waiting.append(Received(peer, WorkerStarted(**same, pid=1)))  # type: ignore[arg-type]
                waiting.append(Received(peer, WorkerReady(**same)))  # type: ignore[arg-type]


def _shown(argv: list[str], names: dict[int, str]) -> str:
    """The command line, with the names of ports in place of the numbers that stand for them on paper."""
    parts = []
    for before, word in zip(["", *argv], argv, strict=False):
        named = names.get(int(word)) if word.isdigit() and before.endswith("port") else None
        parts.append(named or shlex.quote(word))
    return " ".join(parts)


def _env(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_OWN_VARIABLES)}


def show(config: Config, run_dir: Path, on: PaperNodes | None = None) -> Iterator[str]:
    """The resolved config, the placement and every command line, as lines of text.

    Args:
        on: the nodes to plan for; default: this machine with its GPUs.

    Raises:
        NotPlaceable: see `plan`.
    """
    from miles_hpc.agent import gpus

    planned = plan(config, run_dir, on or PaperNodes.here(config, gpus.find(os.environ, wanted=False)))
    yield f"# config ({run_dir}/config.resolved.toml)"
    yield to_toml(config)
    yield "# placement"
    yield from topology([(row.node, row.address, row.worker) for row in planned])
    yield ""
    yield "# commands"
    for row in planned:
        yield f"{row.worker} on {row.node}:"
        yield "    " + " ".join([*(f"{key}={shlex.quote(value)}" for key, value in row.env.items()), row.command])


def topology(workers: list[tuple[str, str, str]]) -> Iterator[str]:
    """One line a node: (node, address, worker) of each worker, workers of a cell counted together."""
    nodes: dict[tuple[str, str], dict[str, int]] = {}
    for node, address, worker in workers:
        cells = nodes.setdefault((node, address), {})
        cell = worker.rpartition("-")[0]
        cells[cell] = cells.get(cell, 0) + 1
    for (node, address), cells in sorted(nodes.items()):
        names = [cell if count == 1 else f"{cell} ({count} ranks)" for cell, count in cells.items()]
        yield f"{node}  {address}  {', '.join(names)}"
