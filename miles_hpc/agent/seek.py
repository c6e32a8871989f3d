"""Looks for the hub's file, on a thread of its own: a shared file system that stalls must not stall the agent."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import msgspec

from miles_hpc import __version__
from miles_hpc.wire import rendezvous, security

FIRST_PAUSE, GROWTH = 0.02, 1.5
"""Seconds between two looks, and by what that grows with each: many agents share the file system."""
FIRST_PAUSE_BESIDE_HUB, GROWTH_BESIDE_HUB = 0.005, 1.02
"""The same for the agent beside the hub, for which the whole run waits: hardly longer than the hub needs."""
LONGEST_PAUSE = 0.5


class Found(msgspec.Struct, frozen=True):
    """One look. `error` is why nothing there can be used; without error and hub there is none yet."""

    hub: rendezvous.Rendezvous | None = None
    keys: security.KeyPair | None = None
    error: str = ""


class HubSeeker:
    """Looks again and again while a hub is wanted. `fileno` becomes readable when a look has ended.

    Args:
        digest: what this agent has read; a hub that has read something else is refused. Empty: not compared.
        beside_hub: the hub starts on this node.
    """

    def __init__(self, run_dir: Path, run_id: str, attempt: int, digest: str, *, beside_hub: bool = False) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._attempt = attempt
        self._digest = digest
        self._wanted = threading.Event()
        self._result: Found | None = None
        self._closed = False
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._asked = False
        self._look_at = 0.0
        self._pause, self._growth = (FIRST_PAUSE_BESIDE_HUB, GROWTH_BESIDE_HUB) if beside_hub else (FIRST_PAUSE, GROWTH)
        # A daemon: one that hangs in the file system must not keep the agent from leaving.
        threading.Thread(target=self._run, name="seek", daemon=True).start()

    @property
    def fileno(self) -> int:
        """For a poller."""
        return self._read_end

    def next_deadline(self) -> float:
        """When `advance` has something to do even if `fileno` is not readable."""
        return self._look_at

    def look_by(self, moment: float) -> None:
        """Look no later than then, if a hub is wanted then."""
        self._look_at = min(self._look_at, moment)

    def advance(self, now: float, *, wanted: bool) -> Found | None:
        """Begin a look that is due; returns what a look has found, once."""
        if now >= self._look_at:
            self._look_at = math.inf
            # One at a time: it may hang for as long as the file system does.
            if wanted and not self._asked:
                self._asked = True
                self._wanted.set()
        found, self._result = self._result, None
        if found is not None:
            os.read(self._read_end, 1)
            self._asked = False
            self._look_at = now + self._pause
            self._pause = min(self._pause * self._growth, LONGEST_PAUSE)
        return found

    def close(self) -> None:
        """Ends the thread at its next turn; the descriptors go with the process, since it may hang."""
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            found = self._look()
            # The byte first: whoever finds the result takes that as well.
            os.write(self._write_end, b"\0")
            self._result = found

    def _look(self) -> Found:
        try:
            hub = rendezvous.newest(self._run_dir, self._attempt, self._run_id)
            if hub is None:
                return Found()
            if hub.version and hub.version != __version__:
                return Found(
                    error=f"the hub of epoch {hub.epoch} is miles-hpc {hub.version}, this agent {__version__}: start "
                    "both from one installation"
                )
            if self._digest and hub.digest and hub.digest != self._digest:
                return Found(
                    error=f"the hub of epoch {hub.epoch} has read another configuration (digest {hub.digest[:12]}) "
                    f"than this agent ({self._digest[:12]}): config.resolved.toml must not change during an attempt"
                )
            return Found(hub=hub, keys=security.load_client(self._run_dir, self._attempt, "agent"))
        except (rendezvous.RendezvousError, security.SecurityError, OSError) as error:
            return Found(error=str(error))
