"""A real multi-node Slurm on one machine, for tests and for trying things out. Needs root on Debian or Ubuntu.

    tools/slurm-cluster up [--nodes 4] [--gpus 8] [--cpus 16] [--memory 200000] [--no-accounting] [--conf KEY=VALUE ...]
    tools/slurm-cluster crash NODE        power off: everything on the node is killed
    tools/slurm-cluster boot NODE         power on again
    tools/slurm-cluster cut|join NODE     network link down / up
    tools/slurm-cluster kill-slurmd|start-slurmd NODE, kill-slurmctld, start-slurmctld
    tools/slurm-cluster exec NODE COMMAND ...
    tools/slurm-cluster status
    tools/slurm-cluster down

Each node is a process in network, pid, mount, UTS and IPC namespaces of its own, with its own slurmd, address and host
name; controller and accounting run on the host. `up` installs missing packages, starts only what is not running, and
rebuilds the cluster when it is called with another shape. `down` ends only what `up` started, by recorded pid and start
time, and removes its state. GPUs are character devices that nothing enforces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal

from configuration import SLURM_CONF, Shape, address, configure, install, node_names
from nodes import boot, crash, enter, remove_cgroups, slurmd, veth
from processes import BASE, die, recorded, run, say, stop, wait_for
from services import BRIDGE, start_accounting, start_controller, start_munge, start_network


def known_nodes() -> list[str]:
    """The nodes of the cluster as it was brought up, running or not."""
    shape = BASE / "run" / "shape"
    return [f"node{index}" for index in range(1, json.loads(shape.read_text())[0] + 1)] if shape.exists() else []


def up(shape: Shape) -> None:
    if os.geteuid() != 0:
        die("needs root: run it with sudo")
    install(shape)
    written = BASE / "run" / "shape"
    if written.exists() and written.read_text() != shape.key():
        jobs = run("squeue", "-h", "-o", "%i", check=False, timeout=30).stdout.split()
        if jobs:
            die(f"the cluster that is up has another shape and {len(jobs)} jobs: let them end, or call `down` first")
        say("another shape: rebuilding")
        down()
    configure(shape)
    written.write_text(shape.key())
    start_munge()
    start_network()
    if shape.accounting:
        start_accounting()
    start_controller()
    for node in node_names(shape):
        boot(node)

    def idle() -> bool:
        names = run("sinfo", "-h", "-N", "-p", "main", "-t", "idle,alloc,mix", "-o", "%N", check=False).stdout.split()
        return len(set(names)) == shape.nodes

    wait_for(f"{shape.nodes} nodes", idle, 60)
    say(f"{shape.nodes} nodes up: {', '.join(f'{node} {address(node)}' for node in node_names(shape))}")


def down() -> None:
    for node in known_nodes():
        crash(node)
    for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        stop(name)
    run("ip", "link", "del", BRIDGE, check=False)
    if SLURM_CONF.is_symlink() and str(SLURM_CONF.readlink()).startswith(str(BASE)):
        SLURM_CONF.unlink()
    remove_cgroups()
    for part in ("run", "etc", "dev", "log"):
        shutil.rmtree(BASE / part, ignore_errors=True)
    with contextlib.suppress(OSError):
        BASE.rmdir()


def status() -> None:
    for name in ["munged", "mariadbd", "slurmdbd", "slurmctld", *known_nodes()]:
        print(f"{name:10} {recorded(name) or 'not running'}")
    print(run("sinfo", check=False).stdout, end="")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="slurm-cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("up")
    verb.add_argument("--nodes", type=int, default=4)
    verb.add_argument("--gpus", type=int, default=8, help="GPUs per node; character devices")
    verb.add_argument("--cpus", type=int, default=16, help="CPUs that each node claims")
    verb.add_argument("--memory", type=int, default=200_000, help="MB that each node claims")
    verb.add_argument("--no-accounting", dest="accounting", action="store_false", help="without slurmdbd and sacct")
    verb.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf")
    for name in ("crash", "boot", "cut", "join", "kill-slurmd", "start-slurmd"):
        verbs.add_parser(name).add_argument("node")
    for name in ("down", "status", "kill-slurmctld", "start-slurmctld"):
        verbs.add_parser(name)
    verb = verbs.add_parser("exec")
    verb.add_argument("node")
    verb.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(namespace=Shape())

    if args.verb == "up":
        up(args)
    elif args.verb == "down":
        down()
    elif args.verb == "status":
        status()
    elif args.verb == "kill-slurmctld":
        stop("slurmctld", (signal.SIGKILL,))
    elif args.verb == "start-slurmctld":
        start_controller()
    else:
        node = args.node
        if node not in known_nodes():
            die(f"no node {node!r}; there are: {', '.join(known_nodes()) or 'none (is the cluster up?)'}")
        if args.verb == "boot":
            boot(node)
        elif args.verb == "crash":
            crash(node)
        elif args.verb in ("cut", "join"):
            run("ip", "link", "set", veth(node), "down" if args.verb == "cut" else "up")
        elif args.verb in ("kill-slurmd", "start-slurmd"):
            slurmd(node, args.verb.split("-")[0])
        else:
            os.execvp("nsenter", enter(node) + args.command)


if __name__ == "__main__":
    main()
