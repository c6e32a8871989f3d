"""Calls to a worker before its stop signal, by a thread: an engine that is paused does not end by the signal alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import HttpCall
from miles_hpc.wire.security import SecurityError, load_http_key

RUN_DIR: Final = "MILES_HPC_RUN_DIR"
ATTEMPT: Final = "MILES_HPC_ATTEMPT"
FAREWELL_S = 1.0
"""Until a worker gets its stop signal, whatever it has answered."""


class Farewell:
    """Makes the calls one after the other; `over` when all were answered, or one was not.

    Args:
        environ: the worker's, which names the run directory that holds the key.
        until: when it is over in any case.
    """

    def __init__(
        self, target: HostAndPort, calls: Sequence[HttpCall], environ: Mapping[str, str], until: float
    ) -> None:
        self.until = until
        self._target = target
        self._calls = calls
        self._environ = environ
        self._over = threading.Event()
        threading.Thread(target=self._say, name="farewell", daemon=True).start()

    def over(self, now: float) -> bool:
        """Whether the stop signal's time has come."""
        return self._over.is_set() or now >= self.until

    def _say(self) -> None:
        import http.client  # here, because it brings more than the rest of the agent, and few workers need it

        try:
            # Read here: a file system that hangs must hold up this thread alone.
            key = load_http_key(Path(self._environ[RUN_DIR]), int(self._environ[ATTEMPT]))
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            for call in self._calls:
                connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=FAREWELL_S)
                try:
                    connection.request("POST", call.path, call.body.encode(), headers)
                    connection.getresponse().read()
                finally:
                    connection.close()
        except (OSError, http.client.HTTPException, SecurityError):
            pass  # it is stopped in any case
        finally:
            self._over.set()
