"""`python -m miles_hpc.hub.run --run-dir D --attempt N --address A`: the hub, started by the first node's agent."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import miles_hpc.wire.lean  # noqa: F401

# isort: split
from miles_hpc import __version__
from miles_hpc.config.load import read_resolved
from miles_hpc.config.node import RESOLVED
from miles_hpc.config.schema import Config
from miles_hpc.hub import journal
from miles_hpc.hub.core import RunInfo
from miles_hpc.hub.eventlog import EventLog
from miles_hpc.hub.http import HubHttp
from miles_hpc.hub.limits import descriptors_needed, raise_nofile
from miles_hpc.hub.ports import HubPorts
from miles_hpc.hub.server import HubServer
from miles_hpc.hub.site import Site
from miles_hpc.hub.state import HubState
from miles_hpc.hub.verdict import read_outcome
from miles_hpc.specs.compute import compute_specs
from miles_hpc.wire import allocator, codec, libc
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.hashes import sha256
from miles_hpc.wire.hub_sockets import HubSockets
from miles_hpc.wire.ids import node_id
from miles_hpc.wire.rendezvous import EpochTaken, Rendezvous, RendezvousError, epochs, newest, publish
from miles_hpc.wire.security import KeyPair, load_http_key, role_keys

_PR_SET_PDEATHSIG = 1
EXIT_EPOCH_TAKEN = 3
"""Another hub has this epoch or a higher one: this one never was."""


SiteOf = Callable[[Path, int, Config], Site]
"""Makes the site of a run directory, attempt and config."""


def main(argv: Sequence[str] | None = None, site_of: SiteOf | None = None) -> int:
    """Run the hub of an attempt to its verdict. Returns 0 when the verdict is on disk, 1 otherwise.

    Args:
        site_of: how to reach the site, for a run that `--slurm` says to be on one.
    """
    started = time.monotonic()
    arguments = _parser().parse_args(argv)
    _die_with_parent()
    allocator.one_arena()
    run_dir = Path(arguments.run_dir).resolve()
    attempt: int = arguments.attempt
    config = read_resolved(run_dir)
    log = EventLog(run_dir / "logs" / f"attempt-{attempt}" / "hub.jsonl")
    logging.basicConfig(level=logging.INFO, handlers=[log.handler()])
    try:
        site = site_of(run_dir, attempt, config) if site_of is not None and arguments.slurm else None
        return _serve(arguments, run_dir, config, log, started, site)
    except EpochTaken as taken:
        log.write("epoch_taken", "warning", reason=str(taken))
        return EXIT_EPOCH_TAKEN
    except Exception as error:
        log.write("hub_failed", "error", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        log.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-hpc hub", description="The hub of one attempt; started by an agent.")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--address", required=True, help="IP literal to listen on; other nodes reach the hub there")
    parser.add_argument("--also", action="append", default=[], help="one more address of this node to listen on")
    parser.add_argument("--node", default=node_id(0), help="the node that this hub runs on")
    parser.add_argument("--epoch", type=int, default=0, help="claim this epoch or none; default: the next free one")
    parser.add_argument("--slurm", action="store_true", help="a signal is Slurm's and asks for a drain")
    parser.add_argument("--run-id", default="", help="default: the name of the run directory")
    return parser


def _die_with_parent() -> None:
    parent = os.getppid()
    libc.call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        raise SystemExit("the agent that started this hub is gone")


def run_digest(run_dir: Path) -> str:
    """What hub and agents must have read alike: the resolved config and the package version, as a hash."""
    content = sha256((run_dir / RESOLVED).read_bytes())
    content.update(__version__.encode())
    return content.hexdigest()


def _check_digest(run_dir: Path, attempt: int, digest: str) -> None:
    """Refuse to claim an epoch over a hub that had read something else.

    Raises:
        RendezvousError: naming both.
    """
    before = newest(run_dir, attempt)
    if before is not None and before.digest and before.digest != digest:
        raise RendezvousError(
            f"the hub of epoch {before.epoch} on {before.node} had read another configuration or package version "
            f"(digest {before.digest[:12]}) than this one ({digest[:12]}): config.resolved.toml must not change "
            "during an attempt"
        )


def _serve(
    arguments: argparse.Namespace, run_dir: Path, config: Config, log: EventLog, started: float, site: Site | None
) -> int:
    run_id, attempt, address = arguments.run_id or run_dir.name, arguments.attempt, arguments.address
    epoch: int = arguments.epoch or max(epochs(run_dir, attempt), default=0) + 1
    digest = run_digest(run_dir)
    _check_digest(run_dir, attempt, digest)
    keys = KeyPair.generate()
    specs = compute_specs(config, run_dir)
    nodes = config.slurm.nodes if arguments.slurm else config.cluster.local_nodes
    workers = sum(spec.scheduling.num_cells * spec.scheduling.num_workers_per_cell for spec in specs)
    raise_nofile(descriptors_needed(nodes, workers), f"the hub of {nodes} nodes and {workers} workers")
    with (
        contextlib.closing(HubPorts(address, config.network.port_range)) as ports,
        HubSockets(
            HostAndPort(address, 0),
            run_id=run_id,
            keys=keys,
            roles=role_keys(run_dir, attempt),
            also=arguments.also,
            place=ports.listen,
        ) as socket,
        ports.listen(
            lambda port: HubHttp(HostAndPort(address, port), load_http_key(run_dir, attempt), log.recent)
        ) as http,
    ):
        info = RunInfo(
            run_id=run_id,
            attempt=attempt,
            epoch=epoch,
            run_dir=str(run_dir),
            expected_nodes=nodes,
            spare_nodes=config.cluster.spare_nodes,
            hub_node=arguments.node,
            hosts=tuple(site.hosts) if site is not None else (),
            drain_on_signal=arguments.slurm,
            drain_margin_s=config.slurm.drain_margin_s,
            package_version=__version__,
            digest=digest,
            hub=f"{socket.address.netloc} pid {os.getpid()}",
            http=http.address.addr,
        )
        state = HubState(specs, info, config.heal, config.timing, started)
        if epoch > 1:
            verdict = read_outcome(run_dir, attempt)
            state.take_over(journal.read(run_dir, attempt, epoch), verdict, time.time())
        server = HubServer(state, socket, log, run_dir, site=site, http=http)
        publish(
            run_dir,
            Rendezvous(
                run_id=run_id,
                attempt=attempt,
                epoch=epoch,
                addresses=socket.hosts,
                port=socket.port,
                public_key=keys.public,
                digest=digest,
                node=arguments.node,
                version=__version__,
                bulk_port=socket.bulk_port,
            ),
        )
        log.write(
            "hub_started",
            hub=info.hub,
            http=info.http,
            epoch=epoch,
            nodes=info.expected_nodes,
            pools={spec.name: spec.scheduling.num_cells for spec in specs},
            start_s=round(time.monotonic() - started, 3),
        )
        codec.make_ready("ToHub")  # while the agents look for the hub and connect
        allocator.give_back()
        server.run()
    if site is not None:
        first = state.core.nodes.get(node_id(0))
        gone = first is None or not first.left or first.left_early
        site.on_leave(state.core.missed_hosts(), first_node_lost=gone and state.core.info.hub_node != node_id(0))
    return 0 if server.verdict_delivered or state.core.cleans_up else 1


if __name__ == "__main__":
    sys.exit(main())
