"""New weights from the trainer's memory into running engines, over one process group per window.

Rank 0 of the group is the trainer; every rank of every engine of the window is another. The group is made for one
window and left after it, so that engines come and go freely between windows. Whoever fails takes the group with it:
then no engine of the window is trusted, and the caller gives the window up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from miles_hpc.inference.engine_api import EngineApi, EngineError, EngineRefused, PauseMode
from miles_hpc.inference.fit import refuse_misfit
from miles_hpc.inference.weights import UpdateResult, WeightsNotTaken, borrowed, verify_label
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.address import HostAndPort

log = logging.getLogger(__name__)

_LEAVE_S = 10.0


class BroadcastBroke(WeightsNotTaken):
    """Somebody was lost in the middle: it is not known which weights an engine holds, and another window may do."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as engines are told of it; `dtype` as torch names it, without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Sender(Protocol):
    """The trainer's end. `join` and `send` block, for `timeout_s` at most, and run in a thread."""

    @property
    def backend(self) -> str:
        """`gloo` or `nccl`."""

    @property
    def buckets(self) -> Sequence[Sequence[TensorHeader]]:
        """All tensors of one version, in the parts that are sent at once."""

    def join(self, address: str, *, world_size: int, name: str, timeout_s: float) -> None:
        """Listen on `address` as rank 0 until all others came."""

    def send(self, bucket: int) -> None:
        """Broadcast the tensors of a bucket, in order."""

    def leave(self) -> None:
        """Close the group; called once, also after a failure."""


async def update_from_sender(
    engines: Sequence[EngineInfo],
    sender: Sender,
    version: int,
    address: HostAndPort,
    pause_mode: PauseMode = "retract",
    *,
    http: aiohttp.ClientSession | None = None,
    timeout_s: float = 120.0,
) -> UpdateResult:
    """Broadcast a version to all engines of a window at once, and verify its label on each.

    Args:
        address: a free port of the trainer's node that engines reach.
        timeout_s: of each step: pause, join, each bucket.

    Engines that cannot even be paused are left out and reported in `failed`.

    Raises:
        BroadcastBroke: give the window up (`abort_update_weights`): the controller continues the engines that answer,
            and replaces the others.
        WeightsNotTaken: names or shapes do not fit; nothing was sent.
    """
    async with borrowed(http) as client:
        apis = {engine.cell: EngineApi(engine.url, client) for engine in engines}
        failed: dict[str, str] = {}
        given = {tensor.name: tuple(tensor.shape) for bucket in sender.buckets for tensor in bucket}
        misfits = await _each(engines, lambda engine: refuse_misfit(apis[engine.cell], given, f"weights {version}"))
        if refused := [error for error in misfits.values() if isinstance(error, EngineRefused)]:
            raise WeightsNotTaken(f"weights {version} were sent to no engine: {refused[0]}") from refused[0]
        paused = await _each(engines, lambda engine: apis[engine.cell].pause(pause_mode))
        failed.update({cell: str(error) for cell, error in paused.items()})
        engines = [engine for engine in engines if engine.cell not in failed]
        if not engines:
            raise BroadcastBroke(f"weights {version}: no engine could be paused: {failed}")
        try:
            await _broadcast(engines, apis, sender, version, address, pause_mode, timeout_s)
        except (EngineError, asyncio.TimeoutError, RuntimeError, OSError) as error:
            raise BroadcastBroke(
                f"weights {version}: the broadcast to {len(engines)} engines broke: {error or 'no answer in time'}"
            ) from error
        ends = await _each(engines, lambda engine: _finish(apis[engine.cell], version))
        failed.update({cell: str(error) for cell, error in ends.items()})
    for cell, reason in failed.items():
        log.warning("weights %d: %s failed: %s", version, cell, reason)
    return UpdateResult(updated=[engine for engine in engines if engine.cell not in failed], failed=failed)


async def _broadcast(
    engines: Sequence[EngineInfo],
    apis: dict[str, EngineApi],
    sender: Sender,
    version: int,
    address: HostAndPort,
    pause_mode: PauseMode,
    timeout_s: float,
) -> None:
    # A name of its own: an engine may still hold the group of a broadcast that broke.
    group = f"weights-{version}-{uuid.uuid4().hex[:8]}"
    world_size = 1 + sum(engine.ranks for engine in engines)
    offsets, offset = {}, 1
    for engine in engines:
        offsets[engine.cell] = offset
        offset += engine.ranks
    loop = asyncio.get_running_loop()

    def in_thread(call: Callable[[], None]) -> asyncio.Future[None]:
        return loop.run_in_executor(None, call)

    async def all_engines(call: Callable[[EngineInfo], Awaitable[None]]) -> None:
        await asyncio.gather(*(call(engine) for engine in engines))

    try:
        await _together(
            in_thread(lambda: sender.join(address.netloc, world_size=world_size, name=group, timeout_s=timeout_s)),
            all_engines(
                lambda engine: apis[engine.cell].init_group(
                    address=address.host,
                    port=address.port,
                    rank_offset=offsets[engine.cell],
                    world_size=world_size,
                    name=group,
                    backend=sender.backend,
                    timeout_s=timeout_s,
                )
            ),
            timeout_s,
        )
        await all_engines(lambda engine: _begin(apis[engine.cell]))
        for index, bucket in enumerate(sender.buckets):
            last = index == len(sender.buckets) - 1

            def receive(
                engine: EngineInfo, bucket: Sequence[TensorHeader] = bucket, last: bool = last
            ) -> Awaitable[None]:
                return apis[engine.cell].receive(
                    [tensor.name for tensor in bucket],
                    [tensor.dtype for tensor in bucket],
                    [list(tensor.shape) for tensor in bucket],
                    group=group,
                    version=version if last else None,
                    # In place, requests stay in the batch, and a flush would be refused with the weights swapped.
                    flush_cache=last and pause_mode != "in_place",
                    timeout_s=timeout_s,
                )

            def send(index: int = index) -> None:
                sender.send(index)

            await _together(in_thread(send), all_engines(receive), timeout_s)
        await all_engines(lambda engine: apis[engine.cell].end_update())
        await all_engines(lambda engine: apis[engine.cell].destroy_group(group))
    except BaseException:
        await asyncio.gather(*(_give_up(apis[engine.cell], group) for engine in engines))
        raise
    finally:
        # Leaving ends what a thread of ours may still wait for in the group; the group's own timeout does in any case.
        leaving = asyncio.ensure_future(in_thread(sender.leave))
        done, _ = await asyncio.wait({leaving}, timeout=_LEAVE_S)
        leaving.add_done_callback(_ignore)
        if not done:
            log.warning("group %s is not left yet after %g s", group, _LEAVE_S)


async def _begin(engine: EngineApi) -> None:
    await engine.begin_update()
    # A controller that came up meanwhile takes the window for lost, and continues what is paused. It ends the sessions
    # that it finds; one that begins after that must send nothing into an engine that serves.
    if await engine.ready():
        raise EngineError(f"{engine.url} was continued before anything was sent to it: its window is lost")


async def _together(ours: asyncio.Future[None], theirs: Awaitable[None], timeout_s: float) -> None:
    """Both ends of one collective; the first error of either ends the wait for the other."""
    parts = [asyncio.ensure_future(theirs), ours]
    done, waiting = await asyncio.wait(parts, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for part in waiting:
        part.cancel()
        part.add_done_callback(_ignore)
    for part in done:
        part.result()
    if waiting:
        raise asyncio.TimeoutError


def _ignore(part: asyncio.Future[None]) -> None:
    if not part.cancelled():
        part.exception()


async def _give_up(engine: EngineApi, group: str) -> None:
    """Leave nothing in an engine that still answers."""
    for leave in (engine.destroy_group(group, timeout_s=_LEAVE_S), engine.end_update(timeout_s=_LEAVE_S)):
        with contextlib.suppress(EngineError):
            await leave


async def _finish(engine: EngineApi, version: int) -> None:
    await verify_label(engine, version)
    await engine.resume()


async def _each(engines: Sequence[EngineInfo], call: Callable[[EngineInfo], Awaitable[None]]) -> dict[str, EngineError]:
    """Call for all engines at once; the errors by cell."""
    outcomes = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    errors: dict[str, EngineError] = {}
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, EngineError):
            errors[engine.cell] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return errors
