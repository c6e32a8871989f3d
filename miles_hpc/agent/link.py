"""The agent's connection to a hub: the first address that answers, and reports that wait while it is down."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from miles_hpc.wire.messages import Message
from miles_hpc.wire.rendezvous import Rendezvous
from miles_hpc.wire.security import KeyPair
from miles_hpc.wire.sockets import HubLink, LinkEvent

OUTBOX_LIMIT = 10_000
"""Reports that are kept for a hub that is away; the oldest go first, the full table makes up for them."""


class AgentLink:
    """What an agent sends to one epoch's hub and gets from it.

    All addresses of the hub are tried at once; the first that completes the handshake is kept. Reports wait, in order,
    while there is no welcome on the present connection; heartbeats and tables do not.

    Args:
        heard_at: when the hub before this one was last heard; the silence goes on until this one speaks.
    """

    def __init__(self, rendezvous: Rendezvous, keys: KeyPair, heard_at: float | None = None) -> None:
        self.rendezvous = rendezvous
        self.welcomed = False
        self._heard_before = time.monotonic() if heard_at is None else heard_at
        self._lost = 0
        self._outbox: deque[Message] = deque(maxlen=OUTBOX_LIMIT)
        self._keys = keys
        self._links: list[HubLink] = []
        self._probe_all()

    def _probe_all(self) -> None:
        hub = self.rendezvous
        self._links = [
            HubLink(endpoint, hub_key=hub.public_key, keys=self._keys, run_id=hub.run_id) for endpoint in hub.endpoints
        ]

    def probe_again(self) -> None:
        """The address that was kept no longer answers: try all of them once more. Waiting reports stay."""
        if len(self.rendezvous.addresses) > 1 and len(self._links) == 1:
            self._heard_before, self._lost = self.heard_at, self.dropped
            self._links[0].close()
            self.welcomed = False
            self._probe_all()

    def pollable(self) -> list[Any]:
        """Sockets to wait for."""
        return [socket for link in self._links for socket in (link.socket, link.monitor)]

    def events(self) -> list[LinkEvent]:
        """What happened to the connection; after `up` the hub wants a hello."""
        found = []
        for link in list(self._links):
            for event in link.events():
                found.append(event)
                if event.kind != "up":
                    self.welcomed = False
                elif len(self._links) > 1:
                    for other in self._links:
                        if other is not link:
                            other.close()
                    self._links = [link]
                    return [event]
        return found

    def receive(self) -> list[Message]:
        """What has arrived."""
        return [message for link in self._links for message in link.receive()]

    def say(self, message: Message) -> bool:
        """Send now or not at all."""
        return self._links[0].send(message)

    def report(self, message: Message) -> None:
        """Send now, or after the next welcome."""
        if not (self.welcomed and not self._outbox and self.say(message)):
            self._lost += len(self._outbox) == OUTBOX_LIMIT
            self._outbox.append(message)

    def on_welcome(self) -> None:
        """Send what was kept."""
        self.welcomed = True
        while self._outbox and self.say(self._outbox[0]):
            self._outbox.popleft()

    @property
    def dropped(self) -> int:
        """Messages that were not sent or not understood."""
        return self._lost + sum(link.dropped for link in self._links)

    @property
    def has_heard(self) -> bool:
        """Whether this epoch's hub has ever said anything."""
        return any(link.heard_at is not None for link in self._links)

    @property
    def heard_at(self) -> float:
        """When a hub was last heard, on the monotonic clock: this one, or the one before it."""
        return max([self._heard_before, *(link.heard_at for link in self._links if link.heard_at is not None)])

    def silent_for(self) -> float:
        """Seconds since a hub was heard. Call `receive` first."""
        return time.monotonic() - self.heard_at

    def close(self, flush_s: float = 0.0) -> None:
        """Give the last reports at most `flush_s` to leave, then close."""
        deadline = time.monotonic() + flush_s
        for link in self._links:
            left = max(0.0, deadline - time.monotonic()) if self.welcomed else 0.0
            link.socket.disable_monitor()
            link.socket.close(linger=int(left * 1000))
            link.monitor.close(linger=0)
