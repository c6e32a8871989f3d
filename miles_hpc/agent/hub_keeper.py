"""What an agent does for the hub: keeps its own alive and leased, and takes over when the node of another is gone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from miles_hpc.agent.claim import Claim, rank_of
from miles_hpc.agent.errand import Errand
from miles_hpc.agent.hub_process import EPOCH_TAKEN, HubProcess
from miles_hpc.agent.lease import Lease, LeaseLost, NoLease, lease_path, read_lease, renew_lease
from miles_hpc.agent.link import AgentLink
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.options import Options
from miles_hpc.agent.peers import Peers
from miles_hpc.agent.supervise import Exit, Supervisor
from miles_hpc.wire.messages import LeaseRenewed, Message, PeerHub, PeerSays, Roster, Standing
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import load_client

RESTARTS, RESTART_WINDOW_S = 5, 600.0
"""How often a hub that dies is started again on this node."""
RENEW_EVERY_S = 2.0
STANDING_FRESH_S = 3.0
"""A hub that has not told its standing for this long has a loop that does not move."""
READ_EVERY_S = 1.0
ASK_EVERY_S = 2.0
TELL_EVERY_S, TELL_FOR_S = 2.0, 180.0
"""How often, and for how long, the agent beside a new hub calls the others: long enough for a link that comes back."""


class HubKeeper:
    """Owned by an agent, whose loop calls it.

    Args:
        process: the hub's on this node, which may run already.
        send: takes a report to the hub.
        clock: monotonic seconds.

    Raises:
        SecurityError: when the agents' key cannot be read.
        OSError: when no peer port can be bound.
    """

    def __init__(
        self,
        options: Options,
        process: HubProcess,
        supervisor: Supervisor,
        log: JsonLog,
        send: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self._options, self._supervisor, self._log, self._send, self._clock = options, supervisor, log, send, clock
        self.process = process
        self._keys = load_client(options.run_dir, options.attempt, "agent")
        self.peers = Peers(options.node, options.address, options.run_id, self._keys, self._answer)
        path = lease_path(options.run_dir, options.attempt)
        self._renew: Errand[Lease] = Errand("lease", lambda epoch: renew_lease(path, epoch))
        self._read: Errand[Lease] = Errand("lease-read", lambda: read_lease(path))
        self._restarts: deque[float] = deque()
        self.suspect_s = options.timing.suspect
        """Silence of the hub from which it may be lost; longer where it has stretched the heartbeats."""
        self._link: AgentLink | None = None
        self._roster: Roster | None = None
        self._standing = Standing(acts=True)
        self._standing_at = -math.inf
        self._powerless_since: float | None = None
        self._claim: Claim | None = None
        self._claimed_epoch = 0
        self._superseded = self._stall_seen = False
        self._started_at = -math.inf
        """When the hub was last started again: it is not to blame for the silence of the one before."""
        self._renew_at = self._read_at = self._ask_at = self._tell_at = -math.inf
        self._tell_until = -math.inf
        self._why_not = ""

    # ------------------------------------------------------------------------------------------ the process
    @property
    def running(self) -> bool:
        """Whether a hub's process is on this node."""
        return self.process.name in self._supervisor.workers

    def on_exit(self, ended: Exit) -> str:
        """The hub's process is gone without a verdict. Returns why this node cannot go on; "" when the run does."""
        reason = self.process.describe(ended)
        self._stall_seen = False
        if self._superseded or ended.exit_code == EPOCH_TAKEN:
            self._log.write("hub_superseded", "warning", reason=reason)
            self._superseded, self._claim, self._claimed_epoch = False, None, 0
            return ""
        if not self._served():
            return self._on_stillborn(ended, reason)
        assert self._link is not None
        return self._start_again(reason, self._link.rendezvous.epoch + 1)

    def _on_stillborn(self, ended: Exit, reason: str) -> str:
        """A hub that this agent has never heard is gone: killed, or broken."""
        link = self._link
        if link is not None and link.rendezvous.node == self._options.node:
            # It had published its epoch.
            next_epoch = link.rendezvous.epoch + 1
        else:
            next_epoch = self._claimed_epoch
        if ended.signal is not None:
            return self._start_again(reason, next_epoch)
        if self._claimed_epoch:
            # The claim of this node came to nothing; the others may claim, and so may this one later.
            self._log.write("hub_did_not_start", "error", reason=reason, epoch=self._claimed_epoch)
            self._claimed_epoch = 0
            return ""
        return reason  # the first hub of the run refuses something, and will again

    def _start_again(self, reason: str, epoch: int) -> str:
        """Start a hub of this epoch (0: the next free one), or say why no more."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= RESTARTS:
            return f"{reason}; it was started {RESTARTS} times again within {RESTART_WINDOW_S:g} s"
        self._restarts.append(now)
        self._log.write("hub_restarts", "error", reason=reason, epoch=epoch)
        if self._claimed_epoch:
            self._claimed_epoch = epoch  # the others do not know yet that the hub is here
        self._started_at = now
        self.process.start(epoch)
        return ""

    def _served(self) -> bool:
        """Whether this agent has heard the hub that it obeys, and that is its own node's."""
        return self._link is not None and self._link.has_heard and self._link.rendezvous.node == self._options.node

    # ------------------------------------------------------------------------------------------ messages
    def on_link(self, link: AgentLink) -> str:
        """The agent obeys another hub. Returns why this node cannot go on; "" when it does."""
        self._link = link
        self._standing, self._standing_at, self._powerless_since = Standing(acts=True), -math.inf, None
        self._claim = None
        hub = link.rendezvous
        if hub.node == self._options.node:
            if hub.epoch == self._claimed_epoch:
                self._tell_until = self._clock() + TELL_FOR_S
            if not self.running:
                # Killed after it had published its epoch, while this agent did not know of it: nobody else will come,
                # since this agent answers for the hub beside it.
                return self._start_again(f"the hub of epoch {hub.epoch} on this node is gone", hub.epoch + 1)
        elif self.running:
            self._step_down(f"epoch {hub.epoch} is on {hub.node}")
        return ""

    def link_to(self, hub: Rendezvous, before: AgentLink | None) -> AgentLink:
        """A link to another hub. The silence before it goes on: a hub that did not act was as good as silent."""
        now = self._clock()
        return AgentLink(hub, self._keys, now if before is None else min(before.heard_at, now - self.powerless_for()))

    def on_message(self, message: Message) -> bool:
        """Take a message of the hub that is for the keeper; False: it is not."""
        if isinstance(message, Roster):
            self._roster = message
            self.peers.set_roster(message.peers)
        elif isinstance(message, Standing):
            now = self._clock()
            if message.acts:
                self._powerless_since = None
            elif self._powerless_since is None:
                self._powerless_since = now
                self._log.write("hub_stands_by", "warning")
            self._standing, self._standing_at = message, now
        else:
            return False
        return True

    def powerless_for(self) -> float:
        """Seconds since the hub said that it does not act: another one may, and counts this node as silent."""
        return 0.0 if self._powerless_since is None else self._clock() - self._powerless_since

    def _answer(self, epoch: int) -> tuple[bool, int]:
        link = self._link
        own = link.rendezvous.epoch if link is not None else 0
        heard = link is not None and link.silent_for() <= self.suspect_s and own >= epoch
        return self.running or heard, own

    def _step_down(self, why: str) -> None:
        if not self._superseded:
            self._superseded = True
            self._log.write("hub_steps_down", "warning", reason=why)
            self._supervisor.stop(self.process.name, text=why, grace=0.0)

    # ------------------------------------------------------------------------------------------ time
    def pollable(self) -> list[Any]:
        """Sockets and descriptors to wait for."""
        return [*self.peers.pollable(), self._renew.fileno, self._read.fileno]

    def next_deadline(self) -> float:
        """When `advance` has something to do; while a hub runs here or is suspect, soon."""
        return self._clock() + 1.0 if self.running or self._claim is not None else math.inf

    def on_pause(self, seconds: float) -> None:
        """This agent stood still."""
        if self._claim is not None:
            self._claim.on_pause(seconds)

    def advance(self, stood_still: float) -> Rendezvous | None:
        """One turn. Returns a newer hub that another agent told of.

        Args:
            stood_still: seconds of the hub's silence that this agent has slept through itself.
        """
        newer = self._hear_peers()
        now = self._clock()
        if self.running and self._served():
            self._watch_loop(stood_still)
            self._keep_lease(now)
        if not self.running:
            self._watch_for_succession(now)
        if now < self._tell_until and now >= self._tell_at and self._link is not None and self.running:
            self._tell_at = now + TELL_EVERY_S
            self.peers.tell_all(self._link.rendezvous)
        return newer

    def _hear_peers(self) -> Rendezvous | None:
        newest: Rendezvous | None = None
        own = self._link.rendezvous.epoch if self._link is not None else 0
        for said in self.peers.receive():
            if isinstance(said, PeerHub):
                if said.hub.epoch > max(own, newest.epoch if newest is not None else 0):
                    newest = said.hub
            elif self._claim is not None:
                self._on_peer(said)
        return newest

    def _on_peer(self, said: PeerSays) -> None:
        assert self._claim is not None
        now = self._clock()
        if self._roster is not None and said.node == self._roster.hub_node:
            self._claim.on_hub_agent(now)
        elif said.hears:
            self._claim.on_yes(now, said.node)

    def _watch_loop(self, stood_still: float) -> None:
        assert self._link is not None
        silent = min(self._link.silent_for() - stood_still, self._clock() - self._started_at)
        if silent > self._options.timing.hub_stall and not self._stall_seen:
            self._stall_seen = True
            self._log.write("hub_stalled", "error", silent_s=round(silent, 1))
            self._supervisor.stop(self.process.name, text=f"its loop stood still for {silent:.0f} s", grace=0.0)

    def _keep_lease(self, now: float) -> None:
        assert self._link is not None
        done = self._renew.take()
        if done is not None:
            if done.value is not None:
                self._send(LeaseRenewed(counter=done.value.counter))
            elif isinstance(done.error, LeaseLost):
                self._step_down(str(done.error))
            else:
                self._log.write("lease_not_renewed", "warning", reason=str(done.error))
        allowed = self._standing.lease and now - self._standing_at <= STANDING_FRESH_S
        if allowed and not self._superseded and now >= self._renew_at and self._renew.ask(self._link.rendezvous.epoch):
            self._renew_at = now + RENEW_EVERY_S

    # ------------------------------------------------------------------------------------------ succession
    def _watch_for_succession(self, now: float) -> None:
        link, roster = self._link, self._roster
        if link is None or roster is None or link.silent_for() <= self.suspect_s:
            self._claim = None
            return
        if self._claim is None:
            nodes = [peer.node for peer in roster.peers]
            self._claim = Claim(rank_of(self._options.node, roster.hub_node, nodes), now)
            self._read.take()
            self._read_at = self._ask_at = now
            self._log.write("hub_suspect", "warning", epoch=link.rendezvous.epoch, rank=self._claim.rank)
        self._collect(now, link, self._claim)
        if self._claim.ripe(now):
            epoch = link.rendezvous.epoch + 1
            self._log.write("claims", "error", epoch=epoch, silent_s=round(link.silent_for(), 1))
            self._claim, self._claimed_epoch = None, epoch
            self.process.start(epoch)
        elif self._claim.why_not != self._why_not:
            self._why_not = self._claim.why_not
            self._log.write("does_not_claim", reason=self._why_not)

    def _collect(self, now: float, link: AgentLink, claim: Claim) -> None:
        done = self._read.take()
        if done is not None:
            if done.value is not None:
                claim.on_lease(now, done.value)
            elif not isinstance(done.error, NoLease):
                self._log.write("lease_not_read", "warning", reason=str(done.error))
        if now >= self._read_at and self._read.ask():
            self._read_at = now + READ_EVERY_S
        if now >= self._ask_at:
            self._ask_at = now + ASK_EVERY_S
            self.peers.ask_all(link.rendezvous.epoch)

    def close(self) -> None:
        """Close the peer port; threads that hang in the file system go with the process."""
        self._renew.close()
        self._read.close()
        self.peers.close()
