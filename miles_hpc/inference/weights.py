"""New weights from disk into running engines: pause, load, verify the label, continue; a failure stays one engine's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec

from miles_hpc.inference.engine_api import (
    CacheNotFlushed,
    EngineApi,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    PauseMode,
)
from miles_hpc.inference.fit import refuse_misfit, shapes_of
from miles_hpc.inference.http_session import HttpKeys, open_http
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.time_limit import within

log = logging.getLogger(__name__)

FLUSH_BUDGET_S = 15.0
_FLUSH_PAUSE_S = 0.2


class WeightsNotTaken(EngineError):
    """No engine took the new weights; the text has each one's reason."""


class UpdateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Which engines serve the new version, and for each other cell the reason."""

    updated: list[EngineInfo]
    failed: dict[str, str]
    unflushed: list[str] = []
    """Cells that were updated in place while requests ran: their old KV is reused until these end."""


async def update_from_disk(
    engines: Sequence[EngineInfo],
    path: str,
    version: int,
    pause_mode: PauseMode = "retract",
    *,
    http: aiohttp.ClientSession | None = None,
    key: str | HttpKeys = "",
    timeout_s: float = 600.0,
) -> UpdateResult:
    """Load the HF directory `path` as `version` into all engines at once.

    A failed engine is left paused: it may hold either weights, and is to be replaced (`end_update_weights(failed=…)`).

    Engines that cannot be reached are no reason to raise: their replacements load the published weights by themselves.

    Raises:
        WeightsNotTaken: when no engine took the weights and at least one answered that it will not.
    """
    given = await asyncio.to_thread(shapes_of, Path(path))

    async def update(engine: EngineApi) -> bool:
        await refuse_misfit(engine, given, f"weights {version} from {path}")
        return await _update_one(engine, path, version, pause_mode, timeout_s)

    async with borrowed(http, key) as client:
        outcomes = await asyncio.gather(*(update(EngineApi(e.url, client)) for e in engines), return_exceptions=True)
    updated, failed, unflushed = [], {}, []
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, (EngineError, asyncio.TimeoutError)):
                raise outcome
            failed[engine.cell] = str(outcome) or f"no answer within {timeout_s:g} s"
            log.warning("weights %d: %s failed: %s", version, engine.cell, failed[engine.cell])
            continue
        updated.append(engine)
        if not outcome:
            unflushed.append(engine.cell)
    unreachable = sum(isinstance(outcome, (EngineUnreachable, asyncio.TimeoutError)) for outcome in outcomes)
    if not updated and len(failed) > unreachable:
        reasons = "; ".join(f"{cell}: {reason}" for cell, reason in failed.items())
        raise WeightsNotTaken(f"weights {version} from {path} reached no engine: {reasons}")
    return UpdateResult(updated=updated, failed=failed, unflushed=unflushed)


async def load_from_disk(engine: EngineApi, path: str, version: int, *, timeout_s: float = 600.0) -> None:
    """Load weights into an engine that gets no traffic, and verify its label; raises EngineError."""
    await refuse_misfit(engine, await asyncio.to_thread(shapes_of, Path(path)), f"weights {version} from {path}")
    await within(timeout_s, _load(engine, path, version, timeout_s, flush=True))
    await verify_label(engine, version)


@contextlib.asynccontextmanager
async def borrowed(
    http: aiohttp.ClientSession | None, key: str | HttpKeys = ""
) -> AsyncIterator[aiohttp.ClientSession]:
    """The caller's client, or one with the run's HTTP key for this call."""
    if http is not None:
        yield http
        return
    async with open_http(key) as own:
        yield own


async def _update_one(engine: EngineApi, path: str, version: int, mode: PauseMode, timeout_s: float) -> bool:
    """Whether the engine's cache is free of old KV afterwards."""

    async def steps() -> bool:
        await engine.pause(mode)
        # In place, requests stay in the batch, and an update that shall flush answers 400 with the weights already
        # swapped under the old label (seen on 0.5.23); so it is not asked to.
        in_place = mode == "in_place"
        await _load(engine, path, version, timeout_s, flush=not in_place)
        flushed = not in_place or await _try_flush(engine)
        await verify_label(engine, version)
        await engine.resume()
        return flushed

    return await within(timeout_s, steps())


async def _load(engine: EngineApi, path: str, version: int, timeout_s: float, *, flush: bool) -> None:
    try:
        await engine.update_weights_from_disk(path, version, flush_cache=flush, timeout_s=timeout_s)
    except CacheNotFlushed:
        # Requests were still being retracted: the weights are new, cache and label are old. Bring both after.
        await _flush(engine)
        await engine.update_weight_version(version)


async def _flush(engine: EngineApi) -> None:
    deadline = time.monotonic() + FLUSH_BUDGET_S
    while not await _try_flush(engine):
        if time.monotonic() >= deadline:
            raise EngineError(f"{engine.url}: its cache could not be flushed within {FLUSH_BUDGET_S:g} s")
        await asyncio.sleep(_FLUSH_PAUSE_S)


async def _try_flush(engine: EngineApi) -> bool:
    try:
        await engine.flush_cache()
    except EngineRefused:
        return False
    return True


async def verify_label(engine: EngineApi, version: int) -> None:
    """Raises EngineError when the engine does not say that it serves `version`."""
    found = await engine.weight_version()
    if found != version:
        raise EngineError(f"{engine.url}: took weights {version}, but its label says {found}")
