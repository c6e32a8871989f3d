"""Engines and routers of an address book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs

ENGINE_POOLS, ROUTER_POOLS = "engine-", "router-"


def engines_in(pools: Mapping[str, Sequence[CellAddrs]]) -> list[EngineInfo]:
    """The engines of an address book; worker 0 of a cell is the one that is called."""
    return [
        EngineInfo(
            cell=cell.cell,
            generation=cell.generation,
            url=_url(cell),
            gpu_offset=int(cell.meta.get("gpu_offset", 0)),
            ranks=int(cell.meta.get("ranks", 1)),
        )
        for pool, cells in pools.items()
        if pool.startswith(ENGINE_POOLS)
        for cell in cells
    ]


def routers_in(pools: Mapping[str, Sequence[CellAddrs]]) -> dict[str, tuple[Generation, str]]:
    """The routers of an address book: cell -> (generation, url)."""
    return {
        cell.cell: (cell.generation, _url(cell))
        for pool, cells in pools.items()
        if pool.startswith(ROUTER_POOLS)
        for cell in cells
        if _url(cell)
    }


def router_url_in(pools: Mapping[str, Sequence[CellAddrs]]) -> str | None:
    """Where to send `/generate`: the first router that is ready, or None."""
    for pool in sorted(pools):
        if pool.startswith(ROUTER_POOLS):
            for cell in pools[pool]:
                if cell.ready and _url(cell):
                    return _url(cell)
    return None


def engine_urls_in(pools: Mapping[str, Sequence[CellAddrs]]) -> dict[tuple[str, Generation], str]:
    """The engines of an address book, for `GenerateClient`."""
    return {(engine.cell, engine.generation): engine.url for engine in engines_in(pools) if engine.url}


def _url(cell: CellAddrs) -> str:
    address = cell.workers[0].get("http") if cell.workers else None
    return "" if address is None else address.addr
