"""The trainer's end of a weight broadcast: its tensors under the names that engines know, in parts of bounded size."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence

import torch

from miles_hpc.engine.embedded.collective import UpdateGroup
from miles_hpc.inference.broadcast import TensorHeader, update_from_sender
from miles_hpc.inference.engine_api import PauseMode
from miles_hpc.inference.http_session import HttpKeys, open_http
from miles_hpc.inference.weights import UpdateResult
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.address import HostAndPort

BUCKET_BYTES = 512 << 20


class TensorSender:
    """Rank 0 of an update group, see `inference.broadcast.Sender`.

    Args:
        tensors: one snapshot, under the names of an HF checkpoint; on the device that `backend` sends from.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, backend: str = "gloo", bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.backend = backend
        self._parts: list[list[tuple[str, torch.Tensor]]] = []
        size = bucket_bytes
        for name, tensor in tensors.items():
            if size >= bucket_bytes:
                self._parts.append([])
                size = 0
            self._parts[-1].append((name, tensor.detach().contiguous()))
            size += tensor.nbytes
        self.buckets = [
            [TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in part]
            for part in self._parts
        ]
        self._group: UpdateGroup | None = None

    def join(self, address: str, *, world_size: int, name: str, timeout_s: float) -> None:
        """Listen on `address` until all engines' ranks came. Raises GroupError."""
        self._group = UpdateGroup(
            address, rank=0, world_size=world_size, name=name, backend=self.backend, timeout_s=timeout_s
        )

    def send(self, bucket: int) -> None:
        """Broadcast one part. Raises GroupError."""
        assert self._group is not None
        self._group.broadcast(tensor for _, tensor in self._parts[bucket])

    def leave(self) -> None:
        """Close the group, if it was made. Raises GroupError."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def send_weights(
    tensors: Mapping[str, torch.Tensor],
    engines: Sequence[EngineInfo],
    version: int,
    *,
    pause_mode: PauseMode,
    host: str,
    keys: HttpKeys,
    timeout_s: float = 120.0,
) -> UpdateResult:
    """Broadcast from this process, which is rank 0, and listen on `host` meanwhile. Raises WeightsNotTaken."""

    async def send() -> UpdateResult:
        async with open_http(keys) as http:
            return await update_from_sender(
                engines,
                TensorSender(tensors),
                version,
                HostAndPort(host, _free_port(host)),
                pause_mode,
                http=http,
                timeout_s=timeout_s,
            )

    return asyncio.run(send())


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
