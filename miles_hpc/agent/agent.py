"""The agent of one node: takes the hub's orders, reports what happens, and lets no worker outlive it.

One thread, one loop. Everything that can happen has a descriptor (hub, monitor, signals, warden, probes) or a deadline.
"""

from __future__ import annotations

import math
import select
import signal
import time

import zmq

from miles_hpc.agent import procfs, signals
from miles_hpc.agent.beginning import Beginning
from miles_hpc.agent.hello import hello
from miles_hpc.agent.hub_keeper import HubKeeper
from miles_hpc.agent.link import AgentLink
from miles_hpc.agent.seek import HubSeeker
from miles_hpc.agent.supervise import Exit
from miles_hpc.agent.table import WorkerTable
from miles_hpc.agent.watches import Watches
from miles_hpc.wire import codec, rendezvous
from miles_hpc.wire.messages import (
    AgentHello,
    DrainRequest,
    FullTable,
    Goodbye,
    Heartbeat,
    Message,
    Refused,
    ReservePorts,
    Shutdown,
    StartWorker,
    StopWorker,
    Welcome,
)

FAST_GRACE = 3.0
"""Longest stop grace of a worker when the agent itself must leave (signal, lost hub, lost warden)."""
HUB_GRACE = 5.0
"""Seconds that the hub has to write its verdict when it is told to stop."""
DRAIN_SLACK = 2.0
"""Seconds beyond `timing.drain` after which an agent that asked for a drain stops its node by itself."""
HUB_LINGER = 15.0
"""Seconds that the hub may go on after its own Shutdown: it waits for the other agents."""
GOODBYE_FLUSH = 1.0
OWN_LAG = 1.0
"""An agent whose turn took longer than this was stopped, or starved, itself."""
HELLO_AGAIN = 0.5
"""Seconds until an agent whose node is taken by a dead incarnation says hello once more."""


class Agent:
    """Runs until it is told to leave, or has to; `run` returns the exit code with nothing of it left."""

    def __init__(self, begun: Beginning) -> None:
        self.options = options = begun.options
        self.log, self.supervisor, self.ports = begun.log, begun.supervisor, begun.ports
        self._inventory, self._differs, self.surroundings = begun.inventory, begun.differs, begun.surroundings
        self._pipe = begun.pipe
        self.link: AgentLink | None = None
        self._clock = time.monotonic
        self.watches = Watches(self._turn_time)
        self.table = WorkerTable(self.supervisor, self.ports, self.watches, self.surroundings, self.log, self._send)
        self.hub = begun.hub
        self.keeper = HubKeeper(options, self.hub, self.supervisor, self.log, self._send, self._clock)
        self._heartbeat_every = options.timing.heartbeat
        self._heartbeat_at = self._full_table_at = math.inf
        self._seq = 0
        now = self._clock()
        self._seeker = HubSeeker(
            options.run_dir, options.run_id, options.attempt, options.digest, beside_hub=options.hub
        )
        self._join_deadline = now + options.timing.join
        self._turned_at = now
        self._stood_still = 0.0
        """Of the silence of the hub, what this agent has slept through itself."""
        self._hello_at = math.inf
        self._hub_silent = self._fenced = False
        self._leaving: tuple[str, int] | None = None
        self._dropped = 0
        """Messages that links to earlier hubs have lost."""
        self._told_to_leave = False
        self._goodbye_said = False
        self._hub_deadline = math.inf
        self._drained_by = math.inf
        self._ending = False
        """The drain was asked for because the scheduler ends the job."""
        self._last_foreign_signal = -math.inf
        codec.make_ready("FromHub")  # the hub takes longer than this agent

    # ------------------------------------------------------------------------------------------------ loop
    def run(self) -> int:
        """The agent's life."""
        while not self._finished():
            ready = self._poll()
            self._on_signals()
            if self.options.lifeline in ready:
                self._leave("the warden of this agent is gone", 1)
            for ended in self.supervisor.reap():
                if ended.name != self.hub.name:
                    self.table.on_ended(ended, by_slurm=self._by_slurm())
            self._talk()
            for finding in self.watches.advance(ready):
                self.table.on_finding(finding, by_slurm=self._by_slurm())
            self.table.advance()
            self._on_exits()
            self._on_time()
        return self._end()

    def _on_exits(self) -> None:
        # The hub last: its end may stop all workers of the table, where those that are gone must not be any more.
        for ended in sorted(self.supervisor.advance(), key=lambda one: one.name == self.hub.name):
            if ended.name == self.hub.name:
                self._on_hub_exit(ended)
            else:
                self.table.on_exit(ended, by_slurm=self._by_slurm())

    def _poll(self) -> set[int]:
        """Wait for whatever comes first. Returns the plain descriptors that are ready."""
        poller = zmq.Poller()
        poller.register(self._pipe, zmq.POLLIN)
        if self.options.lifeline >= 0 and not self._leaving:
            poller.register(self.options.lifeline, zmq.POLLIN)
        for source in (self._seeker.fileno, *self.keeper.pollable(), *self.table.pollable()):
            poller.register(source, zmq.POLLIN)
        if self.link is not None:
            for pollable in self.link.pollable():
                poller.register(pollable, zmq.POLLIN)
        for descriptor, event in self.watches.filenos().items():
            poller.register(descriptor, zmq.POLLIN if event == select.POLLIN else zmq.POLLOUT)
        deadline = min(
            self.supervisor.next_deadline(),
            self.watches.next_deadline(),
            self.table.next_deadline(),
            self.keeper.next_deadline(),
            self._seeker.next_deadline(),
            self._hello_at,
            self._heartbeat_at,
            self._full_table_at,
            self._hub_deadline,
            math.inf if self._leaving else self._drained_by,
            self._silence_deadline(),
        )
        now = self._clock()
        timeout = min(max(0.0, deadline - now), 3600.0)
        ready = {fd for fd, _ in poller.poll(math.ceil(timeout * 1000)) if isinstance(fd, int)}
        self._on_turn(timeout)
        return ready

    def _turn_time(self) -> float:
        """When this turn began, by which workers are judged: a stop of this process in the middle of the turn is found
        at the next one, before anybody is judged by it."""
        return self._turned_at

    def _on_turn(self, waited_s: float) -> None:
        # From turn to turn: a stop in the middle of one counts as well.
        now = self._clock()
        stood_still, self._turned_at = now - self._turned_at - waited_s, now
        if stood_still > OWN_LAG:
            self._on_pause(stood_still)

    def _on_pause(self, seconds: float) -> None:
        """This process was stopped, and perhaps all of the machine: nobody is judged by that time."""
        self.log.write("stood_still", "warning", seconds=round(seconds, 3))
        self.watches.on_pause(seconds)
        self.keeper.on_pause(seconds)
        self._stood_still += seconds

    def _finished(self) -> bool:
        return self._leaving is not None and self.supervisor.only_hopeless()

    def _on_signals(self) -> None:
        for signum in signals.received(self._pipe):
            stops = signum in signals.STOP_SIGNALS
            if stops or signum == signal.SIGUSR2:
                self._last_foreign_signal = self._clock()
                self.log.write("signal", name=signum.name)
            drains = self.options.slurm and not self.options.guest
            if drains and signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                self._ask_to_drain(f"{self.options.node} got {signum.name}", signum != signal.SIGUSR2)
            elif stops or (self.options.guest and signum == signal.SIGUSR2):
                self._leave(f"the agent got {signum.name}", 1, by_signal=True)

    def _by_slurm(self) -> bool:
        """Whether a process that ends now may do so by a signal that this agent got, too."""
        return self._clock() - self._last_foreign_signal < 2.0

    def _ask_to_drain(self, reason: str, ending: bool) -> None:
        """The whole run drains; the hub ends it, or this agent its node when no end has come in time."""
        if self._leaving is not None:
            return
        first = self._drained_by == math.inf
        if first:
            self._drained_by = self._clock() + self.options.timing.drain + DRAIN_SLACK
        # A warning may be followed by the end itself, which leaves less time.
        if first or (ending and not self._ending):
            self._ending = ending
            self._send(DrainRequest(reason=reason, ending=ending))

    def _on_time(self) -> None:
        now = self._clock()
        if now >= self._drained_by and self._leaving is None:
            self._leave("the drain that this node asked for did not come to its end in time", 1)
        self._seek(now)
        if self._leaving is None:
            newer = self.keeper.advance(self._stood_still)
            if newer is not None:
                self._connect(self.keeper.link_to(newer, self.link), now)
        if now >= self._hello_at and self.link is not None:
            self._hello_at = math.inf
            self.link.say(self._hello())
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._heartbeat_every
            self._beat()
        if now >= self._full_table_at and self.link is not None and self.link.welcomed:
            self.link.say(FullTable(workers=self.table.rows()))
            self._full_table_at = now + self.options.timing.anti_entropy
        self._on_silence()
        if self._leaving and not self.table.running() and not self._goodbye_said:
            self._goodbye_said = True
            self._send(Goodbye(reason=self._leaving[0]))
        self._on_overdue()
        if now >= self._hub_deadline and self.hub.name in self.supervisor.workers:
            self._hub_deadline = math.inf
            self.supervisor.stop(self.hub.name, grace=HUB_GRACE)

    def _on_overdue(self) -> None:
        for worker in self.supervisor.overdue():
            self.log.write("still_not_stopped", "warning", worker=worker.name, processes=procfs.named(worker.known))
            if worker.name != self.hub.name:
                self.table.on_overdue(self.supervisor.exit_of(worker), by_slurm=self._by_slurm())

    # ------------------------------------------------------------------------------------------------- hub
    def _beat(self) -> None:
        assert self.link is not None
        if self.link.welcomed:
            self._seq += 1
            self.link.say(Heartbeat(seq=self._seq, dropped=self._dropped + self.link.dropped))
        if self._hub_is_lost():
            self._seeker.look_by(self._clock())
        silent = self.link.silent_for() > self.options.timing.dead
        if silent and not self._hub_silent:
            self.log.write(
                "hub_silent", "warning", silent_s=self.link.silent_for(), grace_s=self.options.timing.hub_grace
            )
        self._hub_silent = silent

    def _silence_deadline(self) -> float:
        """When the silence of the hub has its next consequence."""
        if self._leaving:
            return math.inf
        if self.link is None:
            return self._join_deadline
        timing = self.options.timing
        return self.link.heard_at + (timing.hub_grace + self._stood_still if self._fenced else timing.fence)

    def _on_silence(self) -> None:
        """At `fence` a new hub may start stateful cells elsewhere; at `hub_grace` nobody needs this node any more."""
        if self.link is None or self._leaving:
            return
        # A hub that does not act is as good as silent: another one may act, and counts on this node's fence.
        silent, timing = max(self.link.silent_for(), self.keeper.powerless_for()), self.options.timing
        if silent < timing.suspect:
            self._stood_still = 0.0
        if silent - self._stood_still >= timing.hub_grace:
            self._leave(f"the hub was silent for {silent:.0f} s (timing.hub_grace)", 1)
        elif silent >= timing.fence and not self._fenced:
            self._fenced = True
            self.table.fence(f"fenced: the hub was silent for {silent:.0f} s (timing.fence = {timing.fence:g} s)")
        elif silent < timing.fence:
            self._fenced = False

    def _hub_is_lost(self) -> bool:
        """Whether another hub may be there, or come: also beside one that is heard but does not act."""
        longest = self.keeper.suspect_s
        silent = self.link is None or not self.link.welcomed or self.link.silent_for() > longest
        return silent or self.keeper.powerless_for() > longest

    def _seek(self, now: float) -> None:
        """Look for a hub while there is none, or none that answers, and connect to the newest."""
        found = self._seeker.advance(now, wanted=self._leaving is None and self._hub_is_lost())
        if found is not None and found.error and self.link is None:
            self._leave(found.error, 1)
        elif found is not None and found.error:
            # Of a file system that fails for a while, or a hub that must not be obeyed: the one we know may come back.
            self.log.write("hub_not_found", "warning", text=found.error)
        elif found is not None and found.hub is not None and found.keys is not None:
            if found.hub.epoch > self._epoch:
                self._connect(self.keeper.link_to(found.hub, self.link), now)
            elif self.link is not None and not self.link.welcomed and self.link.silent_for() > self.options.timing.dead:
                self.link.probe_again()
        if self.link is None and self._leaving is None and now >= self._join_deadline:
            place = rendezvous.rendezvous_dir(self.options.run_dir, self.options.attempt)
            self._leave(f"no hub in {place} after {self.options.timing.join:g} s (timing.join)", 1)

    def _connect(self, link: AgentLink, now: float) -> None:
        """From now on this epoch's hub is obeyed, and no lower one."""
        if self.link is not None:
            self._dropped += self.link.dropped
            self.link.close()
        self.link = link
        self._heartbeat_at, self._hello_at = now + self._heartbeat_every, math.inf
        hub = link.rendezvous
        self.log.write("hub_found", epoch=hub.epoch, node=hub.node, addresses=hub.addresses, port=hub.port)
        if reason := self.keeper.on_link(link):
            self._leave(reason, 1)

    @property
    def _epoch(self) -> int:
        return 0 if self.link is None else self.link.rendezvous.epoch

    def _talk(self) -> None:
        if self.link is None:
            return
        for event in self.link.events():
            if event.kind == "up":
                self.link.say(self._hello())
            elif event.kind == "wrong_key":
                self._leave(event.text, 1)
            else:
                self.log.write("hub_link_down", "info" if self._leaving else "warning", text=event.text)
        for message in self.link.receive():
            self._on_message(message)

    def _on_message(self, message: Message) -> None:
        assert self.link is not None
        if isinstance(message, Welcome):
            self.link.on_welcome()
            self.table.tell_of_ends()
            now = self._clock()
            self._heartbeat_every = message.heartbeat
            self.keeper.suspect_s = max(self.options.timing.suspect, 3 * message.heartbeat)
            self._heartbeat_at, self._full_table_at = now, now + self.options.timing.anti_entropy
            if message.node != self.options.node:
                self._leave(f"the hub calls this node {message.node}, but it was started as {self.options.node}", 1)
            self.log.write("welcome", node=message.node, epoch=message.epoch, heartbeat_s=message.heartbeat)
        elif isinstance(message, Refused):
            again = message.code == "node_taken" and self._clock() < self._join_deadline
            self.log.write("refused", "warning" if again else "error", code=message.code, text=message.text)
            if again:
                # By the incarnation that died before this one: its warden starts the next one only then.
                self._hello_at = self._clock() + HELLO_AGAIN
            elif message.code == "unknown":
                self._hello_at = self._clock()
            elif message.code != "malformed":
                self._leave(f"the hub refused this agent ({message.code}): {message.text}", 1)
        elif isinstance(message, ReservePorts):
            self.table.on_reserve(message, accept=self._leaving is None)
        elif isinstance(message, StartWorker):
            self.table.on_start(message, accept=self._leaving is None)
        elif isinstance(message, StopWorker):
            self.table.on_stop(message)
        elif isinstance(message, Shutdown):
            self._told_to_leave = True
            self._leave(message.reason, message.exit_code)
        elif not self.keeper.on_message(message):
            self.log.write("unexpected", "warning", message=type(message).__name__)

    def _hello(self) -> AgentHello:
        return hello(self.options, self._inventory, self._differs, self.table.rows(), self.keeper.peers.port)

    def _send(self, message: Message) -> None:
        if self.link is not None:
            self.link.report(message)

    def _on_hub_exit(self, ended: Exit) -> None:
        """The hub's process is gone; without a verdict it is started again, unless another node has the hub."""
        self._hub_deadline = math.inf
        if self.hub.verdict_stands():
            self._leave("the hub has ended with its verdict", self.hub.verdict_exit_code())
        elif self._leaving is None and (reason := self.keeper.on_exit(ended)):
            self._leave(reason, 1)

    # --------------------------------------------------------------------------------------------- leaving
    def _leave(self, reason: str, code: int, *, by_signal: bool = False) -> None:
        """Begin to stop everything. The first reason stands; only the hub's own Shutdown leaves workers their grace."""
        now = self._clock()
        if self._leaving is None:
            self._leaving = (reason, code)
            self.log.write("leaving", "info" if code == 0 else "error", reason=reason, exit_code=code)
        grace = None if self._told_to_leave and self._drained_by == math.inf else FAST_GRACE
        if self.hub.name in self.supervisor.workers:
            if self._told_to_leave:
                self._hub_deadline = now + HUB_LINGER
            else:
                # First of all, so that it can write why the run ends before it sees workers end. It takes a TERM for
                # the user's wish, so a node that breaks down kills it instead.
                self.supervisor.stop(self.hub.name, grace=HUB_GRACE if by_signal else 0.0)
        self.table.stop_all(reason, grace)

    def _end(self) -> int:
        """All workers are gone, or cannot be ended: kill what had hidden from them, say goodbye, leave nothing else.

        There is no goodbye beside a worker that is left: the hub would start another one in its place at once. It loses
        this node as one that falls silent.
        """
        assert self._leaving is not None
        reason, code = self._leaving
        strays = self.supervisor.strays()
        if strays:
            # Once: whatever they may start meanwhile is the warden's, which looks until nothing is left.
            self.log.write("strays_killed", "warning", processes=[procfs.command_line(p.pid)[:80] for p in strays])
            procfs.kill_all(strays)
        for worker in self.supervisor.workers.values():
            self.log.write("left_behind", "error", worker=worker.name, processes=procfs.named(worker.known))
        if self.link is not None:
            if not self._goodbye_said and not self.table.running():
                self.link.report(Goodbye(reason=reason))
            self.link.close(GOODBYE_FLUSH)
        self._seeker.close()
        self.keeper.close()
        self.ports.close()
        self.surroundings.close()
        self.log.write("left", reason=reason, exit_code=code)
        self.log.close()
        return code
