"""One process of simulated agents: each has a connection, a handshake, heartbeats and a table of its own.

Started by `fleet.py`, which writes one command a line to its stdin and reads one JSON object a line from its stdout.
They do at once what they are told, without a process: what is measured is the hub.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import zmq

import miles_hpc
from miles_hpc.wire import codec
from miles_hpc.wire.messages import (
    AgentHello,
    FullTable,
    Goodbye,
    Heartbeat,
    HeartbeatSeen,
    Message,
    PortsReserved,
    Refused,
    ReservePorts,
    Shutdown,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkerState,
)
from miles_hpc.wire.rendezvous import Rendezvous, newest
from miles_hpc.wire.security import KeyPair, load_client
from miles_hpc.wire.socket_options import prepare, prepare_client


class SimulatedAgent:
    """What the hub sees of one node."""

    def __init__(self, index: int, found: Rendezvous, keys: KeyPair, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.index = index
        self._found = found
        self._header = codec.header(found.run_id)
        self.socket = context.socket(zmq.DEALER)
        endpoint = found.endpoints[0]
        prepare(self.socket, endpoint)
        prepare_client(self.socket, keys, found.public_key)
        self.socket.set(zmq.ROUTING_ID, b"S" + os.urandom(15))
        self.socket.set(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self.said_hello = self.welcomed = self.silent = self.left = False
        self.heartbeat = 0.0
        self.table: dict[str, WorkerState] = {}
        self.sent: dict[int, float] = {}
        self._seq = 0
        self._port = 20000

    def connect(self) -> None:
        self.socket.connect(self._found.endpoints[0].zmq)

    def send(self, message: Message) -> bool:
        try:
            self.socket.send_multipart([self._header, codec.encode_body(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def hello(self) -> None:
        self.said_hello = self.send(
            AgentHello(
                incarnation=f"i{self.index}",
                node_index=self.index,
                node_key=f"simulated/{self.index}",
                host=f"host{self.index}",
                pid=100_000 + self.index,
                address=f"10.{self.index >> 16 & 255}.{self.index >> 8 & 255}.{self.index & 255}",
                package_version=miles_hpc.__version__,
                digest=self._found.digest,
                cpus=8.0,
                wall_s=time.time(),
            )
        )

    def beat(self, now: float) -> None:
        self._seq += 1
        self.sent[self._seq] = now
        if not self.send(Heartbeat(seq=self._seq)):
            del self.sent[self._seq]

    def receive(self) -> list[Message]:
        taken: list[Message] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            taken.append(codec.decode_from_hub(frames, self._found.run_id))

    def obey(self, message: Message) -> None:
        if isinstance(message, ReservePorts):
            ports = dict(message.keep)
            for info in message.ports:
                self._port += 1
                ports.setdefault(info.name, self._port)
            self._note(message, "reserved", ports)
            self.send(PortsReserved(worker=message.worker, generation=message.generation, ports=ports))
        elif isinstance(message, StartWorker):
            self._note(message, "ready", message.ports)
            self.send(WorkerStarted(worker=message.worker, generation=message.generation, pid=200_000 + self.index))
            self.send(WorkerReady(worker=message.worker, generation=message.generation))
        elif isinstance(message, StopWorker):
            self.table.pop(message.worker, None)
            self.send(WorkerExited(worker=message.worker, generation=message.generation, signal=15, cause="stopped"))
        elif isinstance(message, Shutdown):
            self.left = True
            self.send(Goodbye(reason=message.reason))

    def _note(self, order: ReservePorts | StartWorker, state: Any, ports: dict[str, int]) -> None:
        self.table[order.worker] = WorkerState(
            worker=order.worker, generation=order.generation, state=state, pid=200_000 + self.index, ports=ports
        )


class Process:
    """The loop of this process: edge-triggered descriptors, a heap of times, commands."""

    def __init__(self, run_dir: Path, first: int, count: int, total: int, table_every: float) -> None:
        found = newest(run_dir, 0)
        assert found is not None
        keys = load_client(run_dir, 0, "agent")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, count + 16)
        self.agents = [SimulatedAgent(index, found, keys, context) for index in range(first, first + count)]
        self.of_fd = {int(agent.socket.fileno()): agent for agent in self.agents}
        self.due: list[tuple[float, int, str, SimulatedAgent]] = []
        self.total, self.table_every = total, table_every
        self.registered = 0
        self.lags: list[float] = []
        self.heard = 0
        """Heartbeats that the hub has read, by its answers."""
        self.late = 0.0
        self.refused = ""

    def run(self) -> None:
        epoll = select.epoll()
        for fd in self.of_fd:
            epoll.register(fd, select.EPOLLIN)
        stdin = sys.stdin.fileno()
        epoll.register(stdin, select.EPOLLIN)
        say(made=len(self.agents))
        while True:
            timeout = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 1.0
            for fd, _ in epoll.poll(min(timeout, 1.0), maxevents=512):
                if fd == stdin:
                    if not self.command(sys.stdin.readline()):
                        return
                else:
                    self.on_socket(self.of_fd[fd])
            self.on_time()

    def command(self, line: str) -> bool:
        word, *rest = line.split() or ["end"]
        if word == "go":
            for agent in self.agents:
                agent.connect()
                self.on_socket(agent)
        elif word == "window":
            self.lags.clear()
            self.heard, self.late = 0, 0.0
            say(window=True)
        elif word == "report":
            lags_ms = sorted(round(lag * 1e3, 3) for lag in self.lags)
            say(lags_ms=lags_ms, heard=self.heard, late_s=self.late, refused=self.refused)
        elif word == "die":
            wanted = set(map(int, rest))
            for agent in self.agents:
                if agent.index in wanted:
                    agent.silent = True  # powered off: no goodbye, no FIN
            say(died=len(wanted), at=time.time())
        return word != "end"

    def on_socket(self, agent: SimulatedAgent) -> None:
        """The descriptor is edge-triggered: after it fired, and after each send, EVENTS must be looked at."""
        if agent.silent:
            return
        while True:
            events = agent.socket.get(zmq.EVENTS)
            assert isinstance(events, int)
            if not agent.said_hello and events & zmq.POLLOUT:
                agent.hello()
            if not events & zmq.POLLIN:
                return
            now = time.monotonic()
            for message in agent.receive():
                self.on_message(agent, message, now)

    def on_message(self, agent: SimulatedAgent, message: Message, now: float) -> None:
        if isinstance(message, HeartbeatSeen):
            if message.seq in agent.sent:
                self.lags.append(now - agent.sent[message.seq])
            # The hub of a large fleet answers every second one, and has read those before it.
            for seq in [seq for seq in agent.sent if seq <= message.seq]:
                del agent.sent[seq]
                self.heard += 1
        elif isinstance(message, Welcome):
            agent.heartbeat = message.heartbeat
            if not agent.welcomed:
                agent.welcomed = True
                self.registered += 1
                # Spread over the interval, as agents that started at different moments are.
                spread = agent.heartbeat * (agent.index % 997) / 997
                self.plan(now + spread, "beat", agent)
                self.plan(now + self.table_every * (agent.index % 991) / 991, "table", agent)
                if self.registered == len(self.agents):
                    say(registered=self.registered, at=now, heartbeat_s=agent.heartbeat)
        elif isinstance(message, Refused):
            self.refused = message.text
        else:
            if isinstance(message, StopWorker):
                say(stop=message.worker, generation=str(message.generation), at=now)
            agent.obey(message)

    def plan(self, when: float, what: str, agent: SimulatedAgent) -> None:
        heapq.heappush(self.due, (when, agent.index, what, agent))

    def on_time(self) -> None:
        now = time.monotonic()
        for _ in range(256):
            if not self.due or self.due[0][0] > now:
                return
            when, _, what, agent = heapq.heappop(self.due)
            if agent.silent or agent.left:
                continue
            self.late = max(self.late, now - when)
            if what == "beat":
                agent.beat(time.monotonic())
                self.plan(max(when + agent.heartbeat, now), "beat", agent)
            else:
                agent.send(FullTable(workers=list(agent.table.values())))
                self.plan(max(when + self.table_every, now), "table", agent)
            self.on_socket(agent)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("total", type=int)
    parser.add_argument("table_every", type=float)
    given = parser.parse_args()
    Process(given.run_dir, given.first, given.count, given.total, given.table_every).run()
    # Closing thousands of sockets one by one would only delay the end of a process that has nothing left to say.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
