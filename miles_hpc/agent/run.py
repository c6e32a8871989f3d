"""`python -m miles_hpc.agent.run`: the agent of one node, normally started by its warden."""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from miles_hpc.agent.agent import Agent
from miles_hpc.agent.digest import run_digest
from miles_hpc.agent.exits import BROKEN
from miles_hpc.agent.options import Options
from miles_hpc.agent.ports import PortError
from miles_hpc.agent.scratch import ScratchError
from miles_hpc.agent.supervise import SpawnError
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import read_resolved


def parser() -> argparse.ArgumentParser:
    """The agent's command line."""
    found = argparse.ArgumentParser(prog="miles-hpc agent", description="The agent of one node of a run.")
    found.add_argument("--run-dir", type=Path, required=True)
    found.add_argument("--attempt", type=int, required=True)
    found.add_argument("--node-index", type=int, required=True)
    found.add_argument("--address", required=True, help="IP literal that workers of this node listen on")
    found.add_argument("--hub", action="store_true", help="start the hub on this node")
    found.add_argument("--run-id", default="", help="default: the name of the run directory")
    found.add_argument("--local-nodes", type=int, default=1, help="agents of this run on this machine")
    found.add_argument("--slurm", action="store_true", help="signals are Slurm's and ask for a drain")
    found.add_argument("--incarnation", default="", help=argparse.SUPPRESS)
    found.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent to its end. Returns the exit code; `exits.BROKEN` asks for a new incarnation."""
    given = parser().parse_args(argv)
    run_dir = given.run_dir.absolute()
    if given.lifeline >= 0:
        os.set_inheritable(given.lifeline, False)
    _raise_file_limit()
    try:
        config = read_resolved(run_dir)
        options = Options(
            run_dir=run_dir,
            attempt=given.attempt,
            node_index=given.node_index,
            address=given.address,
            run_id=given.run_id or run_dir.name,
            hub=given.hub,
            local_nodes=given.local_nodes,
            slurm=given.slurm,
            incarnation=given.incarnation or secrets.token_hex(6),
            lifeline=given.lifeline,
            timing=config.timing,
            port_range=config.network.port_range,
            digest=run_digest(run_dir),
        )
        agent = Agent(options)
    except (ConfigError, PortError, ScratchError, OSError) as error:
        print(f"agent of node {given.node_index} on {given.address}: {error}", file=sys.stderr)
        return 1
    try:
        return agent.run()
    except SpawnError as error:
        print(f"agent of node {given.node_index} on {given.address}: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return BROKEN


def _raise_file_limit() -> None:
    """Use every descriptor that the site allows; sockets, logs and probes of many workers need more than 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
