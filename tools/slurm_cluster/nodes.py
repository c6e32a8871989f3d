"""Nodes: namespaces with a slurmd in them, on the bridge; power, network link and slurmd of each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from configuration import address
from processes import BASE, SUBNET, die, record, recorded, run, stop, wait_for
from services import BRIDGE

# Process 1 of a node. The host moves the link in after the namespaces exist, so it waits for eth0 before slurmd starts.
NODE_INIT = """
hostname "$1"
mount --bind "$2/etc/hosts" /etc/hosts
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
ip link set lo up
read -r _ <"$2/run/$1/go"
slurmd -f "$2/etc/slurm.conf" -N "$1"
trap : TERM INT HUP
while :; do sleep 86400 & wait $!; done
"""


def veth(node: str) -> str:
    return f"mh-{node}"


def boot(node: str) -> None:
    if recorded(node):
        return
    home = BASE / "run" / node
    (home / "spool").mkdir(parents=True, exist_ok=True)
    go = home / "go"
    go.unlink(missing_ok=True)
    os.mkfifo(go)
    with (BASE / "log" / f"{node}.console").open("ab") as console:
        unshare = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
             "--propagation", "private", "bash", "-c", NODE_INIT, "init", node, str(BASE)],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )  # fmt: skip
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    wait_for(f"the first process of {node}", lambda: bool(children.read_text().split()), 10)
    init = int(children.read_text().split()[0])
    record(node, init)
    run("ip", "link", "del", veth(node), check=False)
    run("ip", "link", "add", veth(node), "type", "veth", "peer", "name", "eth0", "netns", str(init))
    run("ip", "link", "set", veth(node), "master", BRIDGE, "up")
    on(node, "ip", "addr", "add", f"{address(node)}/24", "dev", "eth0")
    on(node, "ip", "link", "set", "eth0", "up")
    on(node, "ip", "route", "add", "default", "via", f"{SUBNET}.1")
    with go.open("w") as gate:
        gate.write("go\n")


def enter(node: str) -> list[str]:
    init = recorded(node)
    if init is None:
        die(f"{node} is not up")
    return ["nsenter", "-t", str(init), "-n", "-m", "-u", "-i", "-p", "--"]


def on(node: str, *argv: str, check: bool = True) -> subprocess.CompletedProcess:
    return run(*enter(node), *argv, check=check)


def crash(node: str) -> None:
    # Process 1 of the pid namespace: the kernel kills all others with it.
    stop(node, (signal.SIGKILL,))
    run("ip", "link", "del", veth(node), check=False)


def slurmd(node: str, action: str) -> None:
    pid_file = BASE / "run" / node / "slurmd.pid"
    if action == "kill":
        # The pid in the file is one of the node's own pid namespace.
        on(node, "kill", "-9", pid_file.read_text().strip())
    else:
        on(
            node,
            "env",
            "-i",
            f"PATH={os.environ['PATH']}",
            "slurmd",
            "-f",
            str(BASE / "etc" / "slurm.conf"),
            "-N",
            node,
        )


def remove_cgroups() -> None:
    """What slurmd leaves of its nodes' control groups, with proctrack/cgroup; they are empty by now."""
    for top in Path("/sys/fs/cgroup").glob("*/slurm_node*"):
        for group, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(group).rmdir()
