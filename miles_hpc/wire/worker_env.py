"""What a program of ours is told by the hub and the agent that started it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation, cell_id, parse_worker_id

PREFIX = "MILES_HPC_"


class WorkerEnvError(Exception):
    """The environment was not set by an agent; the text names the variable."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """Identity of one worker process, from its environment.

    `listen` holds this worker's ports by name, `master` those of its cell's worker 0.
    """

    run_dir: Path
    attempt: int
    worker: str
    pool: str
    cell_index: int
    worker_index: int
    generation: Generation
    node: str
    listen: dict[str, HostAndPort]
    master: dict[str, HostAndPort]
    cell_size: int

    @property
    def cell(self) -> str:
        """Id of the cell that this worker belongs to."""
        return cell_id(self.pool, self.cell_index)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> WorkerEnv:
        """Read `os.environ`, or what is given.

        Raises:
            WorkerEnvError: when a variable is missing or does not parse.
        """
        source = os.environ if environ is None else environ
        worker = _text(source, "WORKER")
        try:
            pool, cell_index, worker_index = parse_worker_id(worker)
            return cls(
                run_dir=Path(_text(source, "RUN_DIR")),
                attempt=int(_text(source, "ATTEMPT")),
                worker=worker,
                pool=pool,
                cell_index=cell_index,
                worker_index=worker_index,
                generation=Generation.parse(_text(source, "GENERATION")),
                node=_text(source, "NODE"),
                listen=_ports(source, "LISTEN"),
                master=_ports(source, "MASTER"),
                cell_size=int(source.get(PREFIX + "CELL_SIZE", "1")),
            )
        except ValueError as failure:
            raise WorkerEnvError(f"the environment of worker {worker!r} does not parse: {failure}") from failure

    def to_environ(self) -> dict[str, str]:
        """The variables that `from_environ` reads back."""
        values = {
            "RUN_DIR": str(self.run_dir),
            "ATTEMPT": str(self.attempt),
            "WORKER": self.worker,
            "GENERATION": str(self.generation),
            "NODE": self.node,
            "LISTEN": _ports_text(self.listen),
            "MASTER": _ports_text(self.master),
            "CELL_SIZE": str(self.cell_size),
        }
        return {PREFIX + name: value for name, value in values.items()}


def _text(source: Mapping[str, str], name: str) -> str:
    value = source.get(PREFIX + name, "")
    if not value:
        raise WorkerEnvError(
            f"{PREFIX}{name} is not set: this program is started by an agent of miles-hpc, not by hand"
        )
    return value


def _ports(source: Mapping[str, str], name: str) -> dict[str, HostAndPort]:
    raw = source.get(PREFIX + name, "{}")
    try:
        found = msgspec.json.decode(raw, type=dict[str, str])
    except msgspec.MsgspecError as failure:
        raise WorkerEnvError(f"{PREFIX}{name}={raw!r} is not a JSON object of host:port texts") from failure
    return {port: HostAndPort.parse(address) for port, address in found.items()}


def _ports_text(ports: Mapping[str, HostAndPort]) -> str:
    return msgspec.json.encode({name: address.netloc for name, address in ports.items()}).decode()
