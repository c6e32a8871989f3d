"""File work that is waited for a moment at most: what it brings is needed now, and a file system that stalls must stall
no loop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

PATIENCE_S = 1.0


class Stalled(OSError):
    """The file system has not answered in time."""


class _Piece:
    def __init__(self, work: Callable[[], Any], late: Callable[[Any], None]) -> None:
        self.work, self.late = work, late
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.given_up = False
        self.value: Any = None
        self.error: Exception | None = None


class Patience:
    """Does pieces of work on one thread of its own, and waits for each for `patience_s` at most.

    While one hangs no other is begun: they would hang, too. For one calling thread.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._hanging: _Piece | None = None
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], R], late: Callable[[R], None] = lambda value: None) -> R:
        """What `work` returns or raises.

        Args:
            late: takes, in the thread, what `work` brings after nobody waits for it any more.

        Raises:
            Stalled: nothing came in time, or an earlier piece of work still hangs.
        """
        if self._hanging is not None and not self._hanging.done.is_set():
            raise Stalled("the file system has stalled")
        if self._thread is None:
            # A daemon: one that hangs in the file system must not keep the process from leaving.
            self._thread = threading.Thread(target=self._run, name="files", daemon=True)
            self._thread.start()
        self._hanging = piece = _Piece(work, late)
        self._pieces.put(piece)
        if not piece.done.wait(self._patience_s):
            with piece.lock:
                if not piece.done.is_set():
                    piece.given_up = True
                    raise Stalled(f"the file system has not answered within {self._patience_s:g} s")
        if piece.error is not None:
            raise piece.error
        value: R = piece.value
        return value

    def close(self) -> None:
        """The thread ends when it can."""
        self._pieces.put(None)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            try:
                piece.value = piece.work()
            except Exception as error:
                piece.error = error
            with piece.lock:
                piece.done.set()
                late = piece.given_up and piece.error is None
            if late:
                piece.late(piece.value)
