"""What an agent does first: it looks at its node, and starts the hub where it is told to.

The hub takes as long to come up as the agent itself, so both come up side by side: what is imported here is what that
needs, and `run` imports the rest after it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from miles_hpc.agent import inventory, procfs, signals
from miles_hpc.agent.gpus import VISIBLE, NodeGpus
from miles_hpc.agent.hub_process import HubProcess
from miles_hpc.agent.interfaces import interface_of
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.log_files import LogFiles
from miles_hpc.agent.options import Options
from miles_hpc.agent.place import place_name
from miles_hpc.agent.ports import PortLocks, Ports
from miles_hpc.agent.scratch import Scratch
from miles_hpc.agent.supervise import Supervisor
from miles_hpc.agent.surroundings import NodeSurroundings
from miles_hpc.agent.sweep import sweep_the_dead


class Beginning:
    """What an agent has before it can talk to a hub. Whoever makes one owns all of it, and closes it.

    Raises:
        GpuError, PortError, ScratchError: when this node cannot be used.
        OSError: when a log or the scratch directory cannot be written.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.log = JsonLog(options.log_dir / "agent.jsonl", options.node)
        mark = f"{options.run_id}/{options.attempt}/{options.node}/{options.incarnation}/"
        self.supervisor = Supervisor(mark, str(options.run_dir))
        self.ports = Ports(
            options.address,
            run_id=options.run_id,
            attempt=options.attempt,
            node=options.node,
            port_range=options.port_range,
            locks=PortLocks(),
        )
        self.inventory = inventory.take(options.node_index, options.local_nodes, wants_gpus=options.wants_gpus)
        if options.local_nodes > 1 and (cpus := inventory.cpu_part(options.node_index, options.local_nodes)):
            # Of this thread alone, which starts all workers.
            os.sched_setaffinity(0, cpus)
        self.differs = inventory.differences(self.inventory, options.granted)
        place = place_name(str(options.run_dir), options.attempt, options.node)
        scratch = Scratch(place, os.environ, options.scratch)
        spare = Path(options.local_logs) if options.local_logs else scratch.root.parent
        logs = LogFiles(spare / f"{place}-logs", options.log_dir, always=bool(options.local_logs))
        gpus = NodeGpus(self.inventory.gpus, os.environ.get(VISIBLE), options.gpu)
        self.surroundings = NodeSurroundings(logs, scratch, gpus, interface=interface_of(options.address))
        self.hub = HubProcess(options, logs, self.supervisor)
        self.pipe = -1
        """Where signals arrive, once `start` has returned."""

    def start(self) -> None:
        """From now on this process is an agent: it gets signals as bytes, and adopts what its workers leave behind.

        Raises:
            SpawnError, RendezvousError: when the hub cannot be started.
        """
        procfs.become_subreaper()
        self.pipe = signals.catch()
        self.log.write(
            "started",
            pid=os.getpid(),
            host=socket.gethostname(),
            incarnation=self.options.incarnation,
            address=self.options.address,
            cpus=self.inventory.cpus,
            memory_bytes=self.inventory.memory_bytes,
            gpus=len(self.inventory.gpus),
            scratch=str(self.surroundings.scratch.root),
            control_groups=self.surroundings.groups.usable,
        )
        for text in self.differs:
            self.log.write("differs_from_grant", "warning", text=text)
        swept = sweep_the_dead(self.options)
        if swept:
            self.log.write("swept", "warning", processes=swept)
        if self.options.hub:
            self.hub.begin(self.log)
