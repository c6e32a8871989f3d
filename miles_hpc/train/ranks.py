"""The driver's end of the trainer cell: one call, all ranks at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from miles_hpc.inference.broadcast import BroadcastBroke
from miles_hpc.inference.weights import UpdateResult, WeightsNotTaken
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.rollout.commits import ManifestFile
from miles_hpc.train.trainer import CheckpointRef
from miles_hpc.wire.address import HostAndPort

if TYPE_CHECKING:
    from miles_hpc.wire.client import HubClient
    from miles_hpc.wire.rpc import RpcClient

POOL = "trainer"
INIT_S = 1800.0
"""Until all ranks have loaded the model or a checkpoint."""
CALL_S = 24 * 3600.0
"""Until a step, a save or an export is done. A rank that dies ends the run long before; one that hangs is noticed by
the other ranks' collectives."""


class Ranks(Protocol):
    """What the driver needs of a trainer cell."""

    async def init(self, incarnation: int, resume: CheckpointRef | None) -> None:
        """Load the start model or a checkpoint."""

    async def warm_start(self) -> dict[str, float]:
        """Supervised steps; returns metrics."""

    async def train(self, rollout_id: int) -> dict[str, float]:
        """All ranks learn from their shards; returns metrics."""

    async def save(self, path: Path) -> list[ManifestFile]:
        """All ranks write into the directory; returns the whole manifest."""

    async def export_weights(self, path: Path) -> None:
        """An HF directory appears at `path`."""

    async def close(self) -> None:
        """Close the connections."""


class RankClients:
    """Ranks that are reached through the address book.

    Raises (all calls): what `RpcClient.call` raises; the first failure of any rank.
    """

    def __init__(self, hub: HubClient, ranks: int) -> None:
        from miles_hpc.wire.rpc import RpcClient

        self._clients: list[RpcClient] = [
            RpcClient(functools.partial(rank_address, hub, rank), hub.env.run_dir, hub.env.attempt)
            for rank in range(ranks)
        ]

    async def init(self, incarnation: int, resume: CheckpointRef | None) -> None:
        """Load the start model or a checkpoint."""
        await self._all("init", INIT_S, incarnation=incarnation, resume=msgspec.to_builtins(resume))

    async def warm_start(self) -> dict[str, float]:
        """Supervised steps; returns metrics of rank 0."""
        return dict((await self._all("warm_start", CALL_S))[0])

    async def train(self, rollout_id: int) -> dict[str, float]:
        """All ranks learn from their shards; returns metrics of rank 0."""
        return dict((await self._all("train", CALL_S, rollout_id=rollout_id))[0])

    async def save(self, path: Path) -> list[ManifestFile]:
        """All ranks write into the directory; returns the whole manifest."""
        parts = await self._all("save", CALL_S, path=str(path))
        return msgspec.convert([entry for part in parts for entry in part], list[ManifestFile])

    async def export_weights(self, path: Path) -> None:
        """An HF directory appears at `path`."""
        await self._all("export_weights", CALL_S, path=str(path))

    async def send_weights(self, engines: Sequence[EngineInfo], path: str, version: int) -> UpdateResult:
        """Rank 0 broadcasts its weights to engines; `path` holds the same, for engines that come later.

        Raises:
            BroadcastBroke, WeightsNotTaken: as `update_from_sender`.
        """
        from miles_hpc.wire.rpc import RpcRemoteError

        params = {"engines": msgspec.to_builtins(list(engines)), "version": version}
        try:
            answers = await self._all("send_weights", CALL_S, **params)
        except RpcRemoteError as error:
            known = {kind.__name__: kind for kind in (BroadcastBroke, WeightsNotTaken)}.get(error.type_name)
            raise (error if known is None else known(error.text)) from error
        return msgspec.convert(answers[0], UpdateResult)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.close()

    async def _all(self, method: str, timeout_s: float, **params: Any) -> list[Any]:
        calls = [asyncio.ensure_future(client.call(method, params, timeout_s=timeout_s)) for client in self._clients]
        try:
            return await asyncio.gather(*calls)
        finally:
            # One failed: the others wait for it in a collective, and nobody waits for them any more.
            for call in calls:
                call.cancel()


def rank_address(hub: HubClient, rank: int) -> HostAndPort | None:
    """Where a rank listens, or None while it is not in the address book."""
    cells = hub.pools.get(POOL) or []
    return cells[0].workers[rank].get("rpc") if cells and len(cells[0].workers) > rank else None
