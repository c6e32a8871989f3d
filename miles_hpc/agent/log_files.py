"""Where the output of workers goes: straight to the run directory, or first to this node and from there.

To this node when the run file says so (`logs.local_dir`), and while the run directory's file system stalls: a worker
that was to be started there would hang in its first line, and an agent that opened its log with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from miles_hpc.agent.patience import Patience, Stalled
from miles_hpc.agent.worker_logs import LogKeeper

SHIP_EVERY_S = 5.0
_CHUNK = 1 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class _Local(msgspec.Struct):
    here: Path
    target: Path
    shipped: int = 0
    cut: bool = False
    """Its middle was taken out."""
    last: bool = False
    """Its writer has ended."""


class LogFiles:
    """The log files of one node.

    Args:
        local: directory on this machine for what cannot, or must not, go to the run directory at once.
        always: all logs go there first that have no spare name.
        home: the node's log directory in the run directory.
    """

    def __init__(self, local: Path, home: Path, *, always: bool = False, patience: Patience | None = None) -> None:
        self._local, self._home, self._always = local, home, always
        self._patience = patience or Patience()
        # One for each file system: that of the run directory may stall.
        self._far, self._near = LogKeeper(), LogKeeper()
        self._lock = threading.Lock()
        self._files: dict[Path, _Local] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        for left in sorted(local.glob("*.log")) if local.is_dir() else ():
            # Of an incarnation that was killed.
            self._ship_later(_Local(left, home / left.name, last=True))

    @contextlib.contextmanager
    def opened(self, name: str, spare: str = "") -> Iterator[tuple[int, Path]]:
        """A log that is open for appending: its descriptor, and where the file is for now.

        Args:
            spare: its name while the run directory stalls, for one that others have written to: what begins here
                comes home as a file of its own, and would come over theirs. So this one goes home at once otherwise.

        Raises:
            OSError: when it can be written nowhere.
        """
        descriptor, path = self._open(name, spare)
        try:
            yield descriptor, path
        finally:
            os.close(descriptor)

    def _open(self, name: str, spare: str) -> tuple[int, Path]:
        target = self._home / name
        if spare or not self._always:
            try:
                descriptor = self._patience.do(lambda: _open(target), os.close)
            except Stalled:
                target = self._home / (spare or name)
            else:
                self._far.watch(target)
                return descriptor, target
        here = self._local / target.name
        descriptor = _open(here)
        self._near.watch(here)
        self._ship_later(_Local(here, target))
        return descriptor, here

    def tail(self, path: Path, limit: int) -> str:
        """The last `limit` bytes of a log as text; "" when it cannot be read in time."""
        if path.parent == self._local:
            return read_tail(path, limit)
        with contextlib.suppress(Stalled):
            return self._patience.do(lambda: read_tail(path, limit))
        return ""

    def release(self, path: Path) -> None:
        """Its writer has ended."""
        with self._lock:
            local = self._files.get(path)
        if local is None:
            self._far.release(path)
        else:
            local.last = True
            self._wake.set()

    def home_of(self, path: Path) -> Path:
        """Where a log is, or will be, in the run directory."""
        return self._home / path.name

    def close(self, patience_s: float = 5.0) -> None:
        """Bring everything home, for at most `patience_s`; what is left stays on this machine."""
        with self._lock:
            for local in self._files.values():
                local.last = True
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience_s)
        self._near.close()
        self._far.close()
        self._patience.close()
        with contextlib.suppress(OSError):
            self._local.rmdir()

    # ------------------------------------------------------------------------------------------ shipping
    def _ship_later(self, local: _Local) -> None:
        with self._lock:
            self._files[local.here] = local
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ship", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.wait(SHIP_EVERY_S)
            self._wake.clear()
            closed = self._closed
            with self._lock:
                files = list(self._files.values())
            for local in files:
                last = local.last
                # A run directory that is full or gone: tried again until the agent leaves.
                with contextlib.suppress(OSError):
                    self._ship(local, whole=last)
                    if last:
                        local.here.unlink(missing_ok=True)
                        with self._lock:
                            self._files.pop(local.here, None)
            if closed:
                return

    def _ship(self, local: _Local, *, whole: bool) -> None:
        """Bring over what is new; at the end all of it when its middle was taken out meanwhile."""
        cut = (self._near.finish if whole else self._near.left_out)(local.here) > 0 or local.cut
        local.cut = cut
        if cut and not whole:
            return  # its bytes have moved; the head is there already
        start = 0 if cut else local.shipped
        target = local.target.with_name(f".{local.target.name}.new") if cut else local.target
        target.parent.mkdir(parents=True, exist_ok=True)
        with local.here.open("rb") as source, open(target, "r+b" if target.exists() else "wb") as goal:  # noqa: PTH123
            source.seek(start)
            goal.seek(start)
            while chunk := source.read(_CHUNK):
                goal.write(chunk)
                start += len(chunk)
        local.shipped = start
        if cut:
            target.replace(local.target)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, _FLAGS, 0o644)


def read_tail(path: Path, limit: int) -> str:
    """The last `limit` bytes of a log file as text; "" when it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""
