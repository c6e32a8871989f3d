"""What a hub needs from whoever lends it its nodes; a local run has no such site.

Everything here may take seconds, so it happens on threads of its own, never in the hub's loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

log = logging.getLogger(__name__)

LOOK_EVERY_S = 20.0
HURRIED_EVERY_S = 3.0


class SiteError(Exception):
    """The site did not answer; it is asked again later."""


class SiteSeen(msgspec.Struct, frozen=True):
    """What a look at the site has shown; an event of the hub's state machine."""

    seconds_left: float | None = None
    """Until the allocation ends; None: no end is known."""
    down_hosts: frozenset[str] = frozenset()
    """Host names of nodes that certainly do not run any more."""
    kill_wait: float | None = None
    """Seconds between SIGTERM and SIGKILL when the site ends the job; None: not known."""


class Site(Protocol):
    """Slurm, or a stand-in for it in tests."""

    @property
    def hosts(self) -> Sequence[str]:
        """Its names of the nodes of the job, in their order."""

    def look(self, hosts: Sequence[str]) -> SiteSeen:
        """The end of the allocation, and which of `hosts` are down. Raises SiteError."""

    def on_verdict(self) -> None:
        """The attempt's verdict is on disk: leave word of it for whoever started the job. Raises OSError."""

    def on_leave(self, lost: Sequence[str], first_node_lost: bool) -> None:
        """The hub's last act. `lost` are hosts whose agents were not there any more at the end."""


class SiteWatch:
    """Looks at the site from time to time, and more often while nodes are lost.

    Args:
        on_seen: called in this thread with each new look.
    """

    def __init__(self, site: Site, on_seen: Callable[[SiteSeen], None]) -> None:
        self._site, self._on_seen = site, on_seen
        self._changed = threading.Condition()
        self._hosts: tuple[str, ...] = ()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)
        self._thread.start()

    def ask_about(self, hosts: Sequence[str]) -> None:
        """Which hosts are in doubt now; a new one is asked about at once."""
        with self._changed:
            news = set(hosts) - set(self._hosts)
            self._hosts = tuple(hosts)
            if news:
                self._changed.notify()

    def close(self) -> None:
        """Look no more. The thread is a daemon: a command that hangs holds nobody up."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                hosts = self._hosts
            every = HURRIED_EVERY_S if hosts else LOOK_EVERY_S
            try:
                seen = self._site.look(hosts)
                self._on_seen(seen)
                if seen.seconds_left is not None and seen.seconds_left < 20 * LOOK_EVERY_S:
                    every = min(every, max(1.0, seen.seconds_left / 20))
            except SiteError as error:
                log.warning("the site did not answer: %s", error)
            with self._changed:
                if not self._closing and self._hosts == hosts:
                    self._changed.wait(every)
