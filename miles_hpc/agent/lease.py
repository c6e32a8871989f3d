"""The lease: a counter on the shared file system that moves while the hub's loop and its majority do.

Written in place, never by rename: a reader that opens the file anew sees a change also where directory entries are
cached. One line of fixed width, so that one write is whole or not there.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from miles_hpc.wire.rendezvous import rendezvous_dir

_FORMAT = "{:020d} {:020d}\n"


class Lease(msgspec.Struct, frozen=True, order=True):
    """Who renewed it, and how often."""

    epoch: int
    counter: int


class LeaseLost(Exception):
    """A hub of a higher epoch holds the lease."""


class NoLease(Exception):
    """There is no lease, or it cannot be read as one."""


def lease_path(run_dir: Path, attempt: int) -> Path:
    """`<run_dir>/rendezvous/<attempt>/lease`."""
    return rendezvous_dir(run_dir, attempt) / "lease"


def read_lease(path: Path) -> Lease:
    """The lease as it is now.

    Raises:
        NoLease: there is none yet, or its content is none.
        OSError: the file system failed.
    """
    try:
        epoch, counter = path.read_bytes().split()
        return Lease(int(epoch), int(counter))
    except FileNotFoundError as failure:
        raise NoLease(f"{path} does not exist") from failure
    except ValueError as failure:
        raise NoLease(f"{path} holds no lease") from failure


def renew_lease(path: Path, epoch: int) -> Lease:
    """Move the counter of this epoch's lease.

    Raises:
        LeaseLost: it belongs to a higher epoch.
        OSError: the file system failed.
    """
    try:
        before = read_lease(path)
    except NoLease:
        before = Lease(0, 0)
    if before.epoch > epoch:
        raise LeaseLost(f"epoch {before.epoch} holds the lease {path}, this hub is of epoch {epoch}")
    renewed = Lease(epoch, before.counter + 1)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, _FORMAT.format(renewed.epoch, renewed.counter).encode(), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return renewed
