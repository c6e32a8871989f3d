"""Where the hub is: one complete file per epoch, published by link(2), so that an epoch has one winner.

Only the run's user reads and writes it (mode 0600): who could change it would choose where agents connect.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from pathlib import Path

import msgspec

from miles_hpc.wire.address import HostAndPort

_NAME = re.compile(r"epoch-(\d{5})\.json")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_PROGRESS_EVERY_S = 10.0


class RendezvousError(Exception):
    """A rendezvous file is of another run or attempt, does not parse, or its permission bits are wrong."""


class EpochTaken(RendezvousError):
    """Another hub published this epoch first."""


class RendezvousTimeout(RendezvousError):
    """No hub of the wanted epoch was published in time."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to reach a hub. `addresses` are bare hosts, best first; all share `port`."""

    run_id: str
    attempt: int
    epoch: int
    addresses: list[str]
    port: int
    public_key: str
    """CURVE public key of this epoch's hub, Z85."""
    digest: str = ""
    """Digest of resolved config, package version and runtimes."""
    node: str = ""
    """The node that the hub runs on."""
    version: str = ""
    """Of the package, at the hub."""
    bulk_port: int = 0
    """Where operators connect; 0: to `port`, too."""

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("addresses of a rendezvous must not be empty")

    @property
    def endpoints(self) -> list[HostAndPort]:
        """All addresses of the hub, for agents and programs."""
        return [HostAndPort(host, self.port) for host in self.addresses]

    @property
    def bulk_endpoints(self) -> list[HostAndPort]:
        """The same for operators."""
        return [HostAndPort(host, self.bulk_port or self.port) for host in self.addresses]


def rendezvous_dir(run_dir: Path, attempt: int) -> Path:
    """`<run_dir>/rendezvous/<attempt>`."""
    return run_dir / "rendezvous" / str(attempt)


def epochs(run_dir: Path, attempt: int) -> list[int]:
    """Published epochs, ascending."""
    try:
        names = [path.name for path in rendezvous_dir(run_dir, attempt).iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def newest_attempt(run_dir: Path) -> int | None:
    """Highest attempt that has published a hub."""
    try:
        names = [path.name for path in (run_dir / "rendezvous").iterdir()]
    except FileNotFoundError:
        return None
    attempts = [int(name) for name in names if name.isdigit()]
    return max((attempt for attempt in attempts if epochs(run_dir, attempt)), default=None)


def publish(run_dir: Path, rendezvous: Rendezvous) -> Path:
    """Claim `rendezvous.epoch` and make its file visible, complete or not at all.

    Raises:
        EpochTaken: when this epoch, or a higher one, has a file.
        OSError: when the directory cannot be written.
    """
    directory = rendezvous_dir(run_dir, rendezvous.attempt)
    directory.mkdir(parents=True, exist_ok=True)
    for path in (directory.parent, directory):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS_WRITE:  # by a generous umask
            path.chmod(mode & ~_OTHERS_WRITE)
    taken = epochs(run_dir, rendezvous.attempt)
    if taken and taken[-1] >= rendezvous.epoch:
        raise EpochTaken(f"epoch {taken[-1]} of attempt {rendezvous.attempt} is published in {directory}")
    target = directory / f"epoch-{rendezvous.epoch:05d}.json"
    draft = directory / f".draft-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # a umask takes bits of the mode above away
            file.write(msgspec.json.format(msgspec.json.encode(rendezvous), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, target)
        except FileExistsError as failure:
            # Over NFS a link(2) whose answer was lost is sent again and then finds its own file.
            if draft.stat().st_nlink != 2:
                raise EpochTaken(f"{target} exists: another hub claimed epoch {rendezvous.epoch}") from failure
    finally:
        draft.unlink(missing_ok=True)
    return target


def read(run_dir: Path, attempt: int, epoch: int, run_id: str | None = None) -> Rendezvous:
    """Read one epoch's file.

    Raises:
        RendezvousError: when it does not parse, names another run, attempt or epoch, others may change it, or it is not
            this user's to read.
        FileNotFoundError: when there is none.
    """
    path = rendezvous_dir(run_dir, attempt) / f"epoch-{epoch:05d}.json"
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except PermissionError as failure:
        raise RendezvousError(f"{path} cannot be read: only the user who started the run can ask its hub") from failure
    if (mode := stat.S_IMODE(status.st_mode)) & _OTHERS_WRITE:
        raise RendezvousError(
            f"{path} has mode {mode:04o}: others may change where this run's programs connect; if nobody did, "
            f"`chmod 600 {path}`"
        )
    try:
        found = msgspec.json.decode(content, type=Rendezvous)
    except msgspec.MsgspecError as failure:
        raise RendezvousError(f"{path} is no rendezvous file: {failure}") from failure
    wanted = (run_id if run_id is not None else found.run_id, attempt, epoch)
    if (found.run_id, found.attempt, found.epoch) != wanted:
        raise RendezvousError(
            f"{path} is of run {found.run_id!r} attempt {found.attempt} epoch {found.epoch}, "
            f"expected run {wanted[0]!r} attempt {attempt} epoch {epoch}"
        )
    return found


def newest(run_dir: Path, attempt: int, run_id: str | None = None) -> Rendezvous | None:
    """The highest published epoch of an attempt, None before the first.

    Raises:
        RendezvousError: as `read`.
    """
    published = epochs(run_dir, attempt)
    return read(run_dir, attempt, published[-1], run_id) if published else None


def wait_for_rendezvous(
    run_dir: Path,
    attempt: int,
    deadline: float,
    *,
    min_epoch: int = 1,
    run_id: str | None = None,
    stop: threading.Event | None = None,
) -> Rendezvous:
    """Wait until a hub of `min_epoch` or higher is published.

    Args:
        deadline: a moment of `time.monotonic()`.
        stop: ends the wait early when set.

    Raises:
        RendezvousTimeout: after the deadline, or once `stop` is set.
        RendezvousError: as `read`.
    """
    import logging  # here: agents read these files first of all, and wait elsewhere

    log = logging.getLogger(__name__)
    stop = stop or threading.Event()
    started = reported = time.monotonic()
    pause = _FIRST_PAUSE_S
    while True:
        found = newest(run_dir, attempt, run_id)
        if found is not None and found.epoch >= min_epoch:
            return found
        now = time.monotonic()
        if now - reported >= _PROGRESS_EVERY_S:
            reported = now
            log.info("waiting for a hub of epoch %d or higher, %.0f s so far", min_epoch, now - started)
        if now >= deadline or stop.is_set():
            raise RendezvousTimeout(
                f"no hub of epoch {min_epoch} or higher in {rendezvous_dir(run_dir, attempt)} "
                f"after {now - started:.1f} s: look at the log of the first node's agent and hub"
            )
        # A shared file system has no notification that works across nodes, so its listing is read again.
        stop.wait(min(pause, deadline - now))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
