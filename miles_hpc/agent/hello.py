"""What an agent says of itself and its node when it meets a hub."""

from __future__ import annotations

import os
import socket
import sys
import time

import miles_hpc
from miles_hpc.agent import procfs
from miles_hpc.agent.interfaces import interface_of
from miles_hpc.agent.inventory import Inventory
from miles_hpc.agent.options import Options
from miles_hpc.wire.messages import AgentHello, WorkerState


def hello(
    options: Options, inventory: Inventory, differs: list[str], rows: list[WorkerState], peer_port: int
) -> AgentHello:
    """The hello of now."""
    return AgentHello(
        incarnation=options.incarnation,
        node_index=options.node_index,
        node_key=f"{os.environ.get('SLURM_JOB_ID', 'local')}/{options.node_index}/{procfs.boot_id()}",
        host=socket.gethostname(),
        pid=os.getpid(),
        address=options.address,
        package_version=miles_hpc.__version__,
        digest=options.digest,
        cpus=inventory.cpus,
        memory_bytes=inventory.memory_bytes,
        gpus=inventory.gpus,
        table=rows,
        wall_s=time.time(),
        differs=differs,
        peer_port=peer_port,
        interface=interface_of(options.address),
        python=sys.version.partition(" ")[0],
        kernel=os.uname().release,
    )
