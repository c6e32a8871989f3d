"""What dead agents have left on this node."""

from __future__ import annotations

import os

from miles_hpc.agent import procfs
from miles_hpc.agent.options import Options


def sweep_the_dead(options: Options) -> list[str]:
    """Kill what dead incarnations of this node's agent, or older attempts of this run, have left here.

    Processes of other nodes of the run on this machine, and of living incarnations, are left alone: a node has one.

    Returns:
        Pid and command of each process that was killed.
    """
    node = f"{options.run_id}/{options.attempt}/{options.node}/"
    own = f"{node}{options.incarnation}/"
    table = procfs.snapshot()
    skip = {os.getpid(), os.getppid()}
    found = []
    for prefix in (node, *(f"{options.run_id}/{n}/" for n in range(options.attempt))):
        for process in procfs.marked(table, prefix, str(options.run_dir), skip=skip):
            mark, _ = procfs.mark_of(process.pid)
            if not mark.startswith(own) and "/warden/" not in mark:
                found.append(process)
    names = [f"{process.pid} {procfs.command_line(process.pid)[:80]}" for process in found]
    procfs.kill_all(found)
    return names
