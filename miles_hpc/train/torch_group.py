"""The trainer's process group, and gradients that are summed over it."""

from __future__ import annotations

import datetime
import logging
import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from miles_hpc.train.trainer import TrainerError
from miles_hpc.wire.address import HostAndPort

log = logging.getLogger(__name__)

JOIN_S = 120.0
"""Until all ranks have joined the group."""
COLLECTIVE_S = 600.0
"""Until a collective gives up: then a rank hangs or is gone."""


class RankLost(TrainerError):
    """A collective failed: another rank is gone, or has not come within `COLLECTIVE_S`."""


def interface_of(host: str) -> str:
    """Name of the network interface that a local address belongs to; empty when it is not found."""
    import psutil

    # The whole of 127.0.0.0/8 belongs to the loopback interface, which lists 127.0.0.1 alone.
    wanted = "127.0.0.1" if host.startswith("127.") else host
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == wanted for entry in addresses):
            return str(name)
    return ""


class Group:
    """The ranks of one trainer cell; with a single one, every operation is the identity.

    Args:
        listen: an address of this rank, whose interface gloo uses.
        master: where rank 0 keeps the store.

    Raises:
        TimeoutError: not all ranks came within `JOIN_S`.
    """

    def __init__(self, rank: int, world: int, listen: HostAndPort, master: HostAndPort) -> None:
        self.rank, self.world = rank, world
        if world == 1:
            return
        if name := interface_of(listen.host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        log.info("rank %d of %d joins at %s over %s", rank, world, master.netloc, name or "any interface")
        try:
            self._store = _store(rank, world, master)
            dist.init_process_group(
                "gloo",
                store=self._store,
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=COLLECTIVE_S),
            )
        except (RuntimeError, dist.DistError) as error:
            raise TimeoutError(
                f"rank {rank} of {world} did not meet the others at {master.netloc} within {JOIN_S:g} s: {error}"
            ) from error

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place: the same bits on each.

        Raises:
            RankLost: another rank did not take part.
        """
        if self.world > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                cause = str(error).partition("\n")[0]
                raise RankLost(
                    f"rank {self.rank} of {self.world} lost another rank, whose log says why ({cause})"
                ) from error
        return tensor

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _store(rank: int, world: int, master: HostAndPort) -> Any:
    listener = None
    if rank == 0:
        # By itself the store listens on every address of the machine, where another node's worker may have the port.
        listener = socket.create_server((master.host, master.port), family=_family(master.host))
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(
        master.host,
        master.port,
        world,
        is_master=rank == 0,
        timeout=datetime.timedelta(seconds=JOIN_S),
        # The store owns the descriptor from here on.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Gradients:
    """All gradients in one buffer, so that one collective sums them; parameters hold views of it.

    This is what sharding (FSDP) would replace: nothing else in the trainer knows where gradients live.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._group = group
        self._buffer = torch.zeros(sum(parameter.numel() for parameter in self._parameters))
        self._views = []
        start = 0
        for parameter in self._parameters:
            self._views.append(self._buffer[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def zero(self) -> None:
        """Begin an update."""
        self._buffer.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def reduce_and_clip(self, max_norm: float) -> float:
        """Sum over the ranks, scale to at most `max_norm`, and return the norm before that."""
        self._group.sum_(self._buffer)
        norm = float(torch.linalg.vector_norm(self._buffer))
        if norm > max_norm:
            self._buffer.mul_(max_norm / norm)
        return norm
