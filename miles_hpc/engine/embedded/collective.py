"""A process group beside the default one, as SGLang makes it for weight updates: rank 0 sends, all others receive.

Both ends must name and order the same things: the store's prefix is the group's name, and torch's own helper derives
the rest. The group needs no default group, and one that failed is closed and made anew under another name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class GroupError(RuntimeError):
    """A group could not be made, or a broadcast in it did not end well."""


class UpdateGroup:
    """One member of a weight update group. Every call may block for `timeout_s`; none is for an event loop's thread.

    Args:
        address: `host:port` that rank 0 listens on and the others connect to.
        backend: `gloo` for CPU tensors, `nccl` for those of a GPU.

    Raises:
        GroupError: when not all members came within `timeout_s`.
    """

    def __init__(
        self, address: str, *, rank: int, world_size: int, name: str, backend: str = "gloo", timeout_s: float = 120.0
    ) -> None:
        self.name = name
        self._rank = rank
        timeout = datetime.timedelta(seconds=timeout_s)
        world: Any = distributed_c10d._world
        try:
            meet: Any = distributed_c10d.rendezvous  # type: ignore[attr-defined]
            store, rank, world_size = next(iter(meet(f"tcp://{address}", rank, world_size, timeout=timeout)))
            store.set_timeout(timeout)
            # Kept: closing it on rank 0 ends the others' connections.
            self._store = store
            helper: Any = distributed_c10d._new_process_group_helper
            self._group, _ = helper(
                world_size,
                rank,
                [],
                distributed_c10d.Backend(backend),
                distributed_c10d.PrefixStore(name, store),
                group_name=name,
                backend_options=None,
                timeout=timeout,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupError(f"group {name} at {address}: rank {rank} of {world_size}: {error}") from error
        world.pg_group_ranks[self._group] = {member: member for member in range(world_size)}

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send (rank 0) or receive in place each tensor, in order.

        Raises:
            GroupError: when a member is gone or did not take part within the timeout.
        """
        try:
            works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise GroupError(f"group {self.name}: broadcast failed on rank {self._rank}: {error}") from error

    def close(self) -> None:
        """Leave the group; what the others wait for in it fails."""
        try:
            dist.destroy_process_group(self._group)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise GroupError(f"group {self.name}: could not be closed: {error}") from error
