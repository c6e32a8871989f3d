"""The ports that a hub listens on: free ones, or of `network.port_range`, which a site's firewall lets through."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from miles_hpc.agent.ports import PortLocks

T = TypeVar("T")


class HubPorts:
    """Finds ports of the range by listening on them: nobody can take one between a look and its use.

    From the end of the range down, since workers search upwards; and with the locks of this machine's agents, which
    give no worker a port that a hub has.

    Args:
        address: for the error text.
        port_range: first and last port; None: whatever is free.
        locks: where a port of the range is locked, `close`d with this; None: with all agents of the user here.
    """

    def __init__(self, address: str, port_range: tuple[int, int] | None, locks: PortLocks | None = None) -> None:
        self._address, self._range = address, port_range
        self._taken: set[int] = set()
        if port_range is not None and locks is None:
            # A hub without a range has no other use for it.
            from miles_hpc.agent.ports import PortLocks

            locks = PortLocks()
        self._locks = locks

    def listen(self, open_at: Callable[[int], T]) -> T:
        """What `open_at` returns for the first port that it can listen on; 0 is any.

        Raises:
            OSError: every port of the range is taken, or the address is no good.
        """
        if self._range is None or self._locks is None:
            return open_at(0)
        first, last = self._range
        for port in range(last, first - 1, -1):
            if port in self._taken or not self._locks.take(port):
                continue
            try:
                opened = open_at(port)
            except OSError as error:
                self._locks.release(port)
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                self._taken.add(port)
                return opened
        raise OSError(
            errno.EADDRINUSE,
            f"no free port for the hub in network.port_range = [{first}, {last}] on {self._address}: widen the range, "
            "or end what holds its ports",
        )

    def close(self) -> None:
        """Unlock all ports; what listens on them should be closed by then."""
        if self._locks is not None:
            self._locks.close()
