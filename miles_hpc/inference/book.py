"""Engines and routers of an address book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_hpc.config.inference import ExternalEngineConfig
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs

ENGINE_POOLS, ROUTER_POOLS = "engine-", "router-"
EXTERNAL = "external-"


def engines_in(pools: Mapping[str, Sequence[CellAddrs]], model: str = "") -> list[EngineInfo]:
    """The engines of a model (default: all) in an address book; worker 0 of a cell is the one that is called."""
    return [
        EngineInfo(
            cell=cell.cell,
            generation=cell.generation,
            url=_url(cell),
            gpu_offset=int(cell.meta.get("gpu_offset", 0)),
            gpus=int(cell.meta.get("gpus", 0)),
            ranks=int(cell.meta.get("ranks", 1)),
        )
        for pool, cells in pools.items()
        if pool.startswith(ENGINE_POOLS)
        for cell in cells
        if _is_of(cell, model)
    ]


def external_engines(engines: Mapping[str, ExternalEngineConfig]) -> list[EngineInfo]:
    """Engines that somebody else runs; they are in no address book. Cells are called after their names."""
    infos, ranks = [], 0
    for name, engine in engines.items():
        url = engine.url.rstrip("/")
        infos.append(
            EngineInfo(
                cell=f"{EXTERNAL}{name}", generation=Generation(0, 1), url=url, gpu_offset=ranks, ranks=engine.ranks
            )
        )
        ranks += engine.ranks
    return infos


def routers_in(pools: Mapping[str, Sequence[CellAddrs]], model: str = "") -> dict[str, tuple[Generation, str]]:
    """The routers of a model (default: all) in an address book: cell -> (generation, url)."""
    return {
        cell.cell: (cell.generation, _url(cell))
        for pool, cells in pools.items()
        if pool.startswith(ROUTER_POOLS)
        for cell in cells
        if _url(cell) and _is_of(cell, model)
    }


def router_url_in(pools: Mapping[str, Sequence[CellAddrs]], model: str = "") -> str | None:
    """Where to send a model's `/generate`: its first router that is ready, or None."""
    for pool in sorted(pools):
        if pool.startswith(ROUTER_POOLS):
            for cell in pools[pool]:
                if cell.ready and _url(cell) and _is_of(cell, model):
                    return _url(cell)
    return None


def engine_urls_in(
    pools: Mapping[str, Sequence[CellAddrs]],
    model: str = "",
    external: Mapping[str, ExternalEngineConfig] | None = None,
) -> dict[tuple[str, Generation], str]:
    """The engines of a model in an address book, and its external ones, for `GenerateClient`."""
    engines = engines_in(pools, model) + external_engines(external or {})
    return {(engine.cell, engine.generation): engine.url for engine in engines if engine.url}


def _is_of(cell: CellAddrs, model: str) -> bool:
    return not model or cell.meta.get("model", model) == model


def _url(cell: CellAddrs) -> str:
    address = cell.workers[0].get("http") if cell.workers else None
    return "" if address is None else address.addr
