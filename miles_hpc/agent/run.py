"""`python -m miles_hpc.agent.run`: the agent of one node, normally started by its warden."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import miles_hpc.wire.lean  # noqa: F401

# isort: split
from miles_hpc.agent.beginning import Beginning
from miles_hpc.agent.digest import run_digest
from miles_hpc.agent.exits import BROKEN
from miles_hpc.agent.gpus import GpuError
from miles_hpc.agent.inventory import Granted
from miles_hpc.agent.options import Options
from miles_hpc.agent.ports import PortError
from miles_hpc.agent.scratch import ScratchError
from miles_hpc.agent.supervise import SpawnError
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.node import read_node_config
from miles_hpc.wire import allocator

FILES_NEEDED = 512
"""Open files of an agent or a hub: sockets, logs and probes of a node's workers, the agents of a small fleet."""


class Unusable(Exception):
    """No agent can be on this node; the text says why."""


def parser() -> argparse.ArgumentParser:
    """The agent's command line."""
    found = argparse.ArgumentParser(prog="miles-hpc agent", description="The agent of one node of a run.")
    found.add_argument("--run-dir", type=Path, required=True)
    found.add_argument("--attempt", type=int, required=True)
    found.add_argument("--node-index", type=int, required=True)
    found.add_argument("--address", required=True, help="IP literal that workers of this node listen on")
    found.add_argument("--also", action="append", default=[], help="one more address of this node, for a hub on it")
    found.add_argument("--hub", action="store_true", help="start the hub on this node")
    found.add_argument("--run-id", default="", help="default: the name of the run directory")
    found.add_argument("--local-nodes", type=int, default=1, help="agents of this run on this machine")
    found.add_argument("--slurm", action="store_true", help="signals are Slurm's and ask for a drain")
    found.add_argument("--guest", action="store_true", help="this node's job joined a run that another job began")
    for name, what in (("cpus", "CPUs"), ("memory", "bytes of memory"), ("gpus", "GPUs")):
        text = f"{what} that the scheduler has granted here; 0: not said"
        found.add_argument(f"--granted-{name}", type=int, default=0, help=text)
    found.add_argument("--incarnation", default="", help=argparse.SUPPRESS)
    found.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent to its end. Returns the exit code; `exits.BROKEN` asks for a new incarnation."""
    given = parser().parse_args(argv)
    run_dir = given.run_dir.absolute()
    if given.lifeline >= 0:
        os.set_inheritable(given.lifeline, False)
    allocator.one_arena()
    try:
        _raise_file_limit()
        begun = Beginning(_options(given, run_dir))
    except (ConfigError, GpuError, PortError, ScratchError, OSError) as error:
        print(f"agent of node {given.node_index} on {given.address}: {error}", file=sys.stderr)
        return 1
    try:
        begun.start()
        return _go_on(begun)
    except (SpawnError, Unusable) as error:
        print(f"agent of node {given.node_index} on {given.address}: {error}", file=sys.stderr)
        begun.log.close()
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        begun.log.close()
        return BROKEN


def _go_on(begun: Beginning) -> int:
    # Imported now that a hub is coming up beside this process.
    from miles_hpc.agent.agent import Agent
    from miles_hpc.wire.security import SecurityError

    try:
        agent = Agent(begun)
    except (SecurityError, OSError) as error:
        # The hub ends with this process, which has started it.
        raise Unusable(str(error)) from error
    allocator.give_back()
    return agent.run()


def _options(given: argparse.Namespace, run_dir: Path) -> Options:
    config = read_node_config(run_dir)
    return Options(
        run_dir=run_dir,
        attempt=given.attempt,
        node_index=given.node_index,
        address=given.address,
        also=tuple(given.also),
        run_id=given.run_id or run_dir.name,
        hub=given.hub,
        local_nodes=given.local_nodes,
        slurm=given.slurm,
        guest=given.guest,
        incarnation=given.incarnation or os.urandom(6).hex(),
        lifeline=given.lifeline,
        timing=config.timing,
        port_range=config.network.port_range,
        digest=run_digest(run_dir),
        scratch=config.cluster.scratch,
        local_logs=config.logs.local_dir,
        gpu=config.gpu,
        wants_gpus=config.wants_gpus,
        granted=Granted(cpus=given.granted_cpus, memory_bytes=given.granted_memory, gpus=max(0, given.granted_gpus)),
    )


def _raise_file_limit() -> None:
    """Use every descriptor that the site allows; sockets, logs and probes of many workers need more than 1024.

    Raises:
        OSError: when that is not enough.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_NEEDED:
        raise OSError(
            errno.EMFILE,
            f"at most {hard} open files are allowed here (hard limit, `ulimit -Hn`), and {FILES_NEEDED} are needed: "
            "ask for more, or give srun --propagate=NONE",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
