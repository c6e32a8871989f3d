"""File work that may hang: done by a thread of its own, so that a shared file system that stalls stalls no loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

R = TypeVar("R")


class Done(msgspec.Struct, Generic[R], frozen=True):
    """What one errand brought: a value, or the error that its work raised."""

    value: R | None = None
    error: Exception | None = None


class Errand(Generic[R]):
    """Does one kind of work, one piece at a time. `fileno` becomes readable when `take` has something.

    Args:
        work: runs in the thread.
    """

    def __init__(self, name: str, work: Callable[..., R]) -> None:
        self._work = work
        self._wanted = threading.Event()
        self._arguments: tuple[Any, ...] = ()
        self._result: Done[R] | None = None
        self._under_way = self._closed = False
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A daemon: one that hangs in the file system must not keep the process from leaving.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def fileno(self) -> int:
        """For a poller."""
        return self._read_end

    def ask(self, *arguments: Any) -> bool:
        """Begin a piece of work. False: the one before is still under way, and stays the only one."""
        if self._under_way:
            return False
        self._under_way, self._arguments = True, arguments
        self._wanted.set()
        return True

    def take(self) -> Done[R] | None:
        """What was brought, once; None while there is nothing."""
        found, self._result = self._result, None
        if found is not None:
            os.read(self._read_end, 1)
            self._under_way = False
        return found

    def close(self) -> None:
        """The thread ends at its next turn; the descriptors go with the process, since it may hang."""
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            try:
                done: Done[R] = Done(value=self._work(*self._arguments))
            except Exception as error:
                done = Done(error=error)
            # The byte first: whoever finds the result takes that as well.
            os.write(self._write_end, b"\0")
            self._result = done
