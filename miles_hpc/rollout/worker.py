"""The rollout worker: runs groups for the executor, and keeps what it finished until it is committed or superseded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_hpc.config.schema import Config
from miles_hpc.rollout.client import POOL as EXECUTOR_POOL
from miles_hpc.rollout.filters import Filter
from miles_hpc.rollout.generate import GenerateFunction, Services, generate_function
from miles_hpc.rollout.group_run import GroupError, GroupInterrupted, GroupRun
from miles_hpc.rollout.rewards import Scorer
from miles_hpc.rollout.work_messages import (
    BeatSeen,
    FreeGroups,
    GroupDone,
    GroupFailed,
    GroupPartial,
    GroupReceived,
    InterruptGroups,
    RunGroup,
    ToWorker,
    WorkBeat,
    WorkHello,
    WorkWelcome,
)
from miles_hpc.rollout.work_socket import WorkLink
from miles_hpc.transport.columns import Buffer
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)

BEAT_S = 1.0
_PROGRESS_S = 10.0


class AddressBook(Protocol):
    """What the worker needs of a HubClient."""

    @property
    def pools(self) -> dict[str, list[CellAddrs]]: ...

    def on_change(self, callback: Callable[[dict[str, list[CellAddrs]]], None]) -> Callable[[], None]: ...


@dataclass
class _Kept:
    """A finished or failed group, held for replay."""

    message: GroupDone | GroupPartial | GroupFailed
    parcel: Buffer | None
    nbytes: int
    received: bool = False


class RolloutWorker:
    """Connects to whatever executor the address book names, and runs what it is told.

    Args:
        env: identity of this process.
        hub: the address book.

    Raises:
        FunctionPathError: the configured generate or reward function does not import.
    """

    def __init__(self, config: Config, env: WorkerEnv, hub: AddressBook) -> None:
        self._config = config
        self._env = env
        self._hub = hub
        self._services = Services(config, lambda: hub.pools, env.run_dir, env.attempt)
        self._generate: GenerateFunction = generate_function(config.rollout.generate)
        self._scorer = Scorer(config.reward.function, timeout_s=config.reward.timeout_s, url=config.reward.url)
        self._filters = [Filter(path) for path in config.rollout.filters]
        self._eval_functions: dict[str, GenerateFunction] = {}
        rollout = config.rollout
        # Under `sample`, further groups wait here, so that a sample that ends makes room for the next one at once.
        by_sample = rollout.submission == "sample"
        self._credits = rollout.concurrency * (2 if by_sample else 1)
        self._slots = asyncio.Semaphore(rollout.concurrency * rollout.samples_per_prompt) if by_sample else None
        self._aborts: set[asyncio.Task[None]] = set()
        self._incarnation = 0
        self._running: dict[str, tuple[GroupRun, asyncio.Task[None]]] = {}
        self._kept: dict[str, _Kept] = {}
        self._kept_bytes = 0
        self._link: WorkLink | None = None
        self._welcomed = False
        self._heard = 0.0
        self._failure: BaseException | None = None
        self._stopping = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop`.

        Raises:
            Exception: a bug of ours in a group; the process should end and be started anew.
        """
        loop = asyncio.get_running_loop()
        remove = self._hub.on_change(lambda pools: _tell(loop, self._wake.set))
        said = time.monotonic()
        try:
            while not self._stopping and self._failure is None:
                self._wake.clear()
                self._follow()
                self._beat()
                if self._welcomed:
                    said = time.monotonic()
                elif time.monotonic() - said > _PROGRESS_S:
                    said = time.monotonic()
                    log.info("waiting for an executor (address %s)", self._address())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), BEAT_S)
            if self._failure is not None:
                raise self._failure
        finally:
            remove()
            await self._close()

    def stop(self) -> None:
        """End `run`."""
        self._stopping = True
        self._wake.set()

    async def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        tasks = [*(task for _, task in self._running.values()), *self._aborts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._scorer.close()
        await self._services.close()

    # ------------------------------------------------------------------------------------------ connection
    def _address(self) -> HostAndPort | None:
        cells = self._hub.pools.get(EXECUTOR_POOL, [])
        return cells[0].workers[0].get("work") if cells and cells[0].workers else None

    def _follow(self) -> None:
        """A moved or silent executor gets a new connection: only its hello tells both ends what the other has."""
        address = self._address()
        silent_s = time.monotonic() - self._heard
        if self._link is not None and (address != self._link.address or silent_s > self._config.timing.dead):
            log.info("leaving the executor at %s (silent for %.1f s)", self._link.address.netloc, silent_s)
            self._link.close()
            self._on_down("")
        if self._link is None and address is not None:
            self._heard = time.monotonic()
            self._link = WorkLink(
                address,
                self._env.run_dir,
                self._env.attempt,
                on_up=self._hello,
                on_message=self._guarded,
                on_down=self._on_down,
            )

    def _on_down(self, reason: str) -> None:
        if reason:
            log.warning("lost the executor at %s", reason)
        # Tried again at the next beat, not at once: what refuses a connection refuses the next one too.
        self._link = None
        self._welcomed = False

    def _hello(self) -> None:
        if self._link is not None:
            self._link.send(
                WorkHello(
                    worker=self._env.worker,
                    generation=self._env.generation,
                    pid=os.getpid(),
                    credits=self._credits,
                    incarnation=self._incarnation,
                    holds=[*self._running, *self._kept],
                )
            )

    def _beat(self) -> None:
        if self._link is not None and self._welcomed:
            stages = [run.stage() for run, _ in self._running.values()]
            self._link.send(WorkBeat(incarnation=self._incarnation, running=stages))

    # ------------------------------------------------------------------------------------------ orders
    def _guarded(self, message: ToWorker) -> None:
        try:
            self._on_message(message)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the process: a bug of ours must not leave a worker that is connected and deaf."""
        self._failure = error
        self._wake.set()

    def _on_message(self, message: ToWorker) -> None:
        self._heard = time.monotonic()
        match message:
            case WorkWelcome():
                self._on_welcome(message)
            case RunGroup():
                self._on_run(message)
            case InterruptGroups(incarnation=self._incarnation):
                self._interrupt(message.groups)
            case GroupReceived(incarnation=self._incarnation):
                if message.group in self._kept:
                    self._kept[message.group].received = True
                    self._bound_kept()
            case FreeGroups(incarnation=self._incarnation):
                self._forget(message.groups)
            case InterruptGroups() | GroupReceived() | FreeGroups() | BeatSeen():
                pass

    def _on_welcome(self, message: WorkWelcome) -> None:
        if message.incarnation != self._incarnation:
            log.info("training incarnation %d; %d groups dropped", message.incarnation, len(self._running))
            self._forget([*self._running, *self._kept])
            self._incarnation = message.incarnation
        if not self._welcomed:
            self._welcomed = True
            # What an earlier connection may have lost; the executor drops what it has by the group's id.
            for kept in self._kept.values():
                if not kept.received:
                    self._send(kept)

    def _on_run(self, order: RunGroup) -> None:
        name = order.spec.id
        if order.incarnation != self._incarnation or name in self._running:
            return
        if name in self._kept:
            self._send(self._kept[name])
            return
        generate = self._generate_of(order)
        run = GroupRun(order, self._config, self._services, generate, self._scorer, self._filters, self._slots)
        self._running[name] = (run, asyncio.ensure_future(self._run(run)))

    def _generate_of(self, order: RunGroup) -> GenerateFunction:
        if order.sampling is None:
            return self._generate
        path = order.sampling.generate or "single_turn"
        if path not in self._eval_functions:
            self._eval_functions[path] = generate_function(path)
        return self._eval_functions[path]

    def _interrupt(self, groups: Sequence[str]) -> None:
        rids = [rid for name in groups if name in self._running for rid in self._running[name][0].interrupt()]
        if rids:
            task = asyncio.ensure_future(self._services.abort(rids))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _run(self, run: GroupRun) -> None:
        name, incarnation = run.order.spec.id, run.order.incarnation
        started = time.monotonic()
        try:
            packing = await run.run()
        except GroupInterrupted as interrupted:
            partial = GroupPartial(incarnation=incarnation, group=name, samples=interrupted.partial)
            self._finish(name, _Kept(partial, None, 0))
        except GroupError as error:
            if not error.reason.startswith("filtered_"):
                log.warning("group failed (%s): %s", error.reason, error)
            failed = GroupFailed(
                incarnation=incarnation,
                group=name,
                reason=error.reason,
                text=str(error)[-8000:],
                reward_calls=run.reward_calls,
            )
            self._finish(name, _Kept(failed, None, 0))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug here, not in the user's functions: end, and be started anew
            self._fail(error)
        else:
            seconds = time.monotonic() - started
            done = GroupDone(
                incarnation=incarnation,
                group=name,
                reward_calls=0 if run.order.evaluation else run.reward_calls,
                seconds=seconds,
            )
            parcel = packing.to_bytes()
            self._finish(name, _Kept(done, parcel, len(parcel)))

    # ------------------------------------------------------------------------------------------ keeping
    def _finish(self, name: str, kept: _Kept) -> None:
        del self._running[name]
        self._kept[name] = kept
        self._kept_bytes += kept.nbytes
        if self._welcomed:
            self._send(kept)

    def _send(self, kept: _Kept) -> None:
        if self._link is not None:
            self._link.send(kept.message, kept.parcel)

    def _forget(self, groups: Sequence[str]) -> None:
        for name in groups:
            kept = self._kept.pop(name, None)
            self._kept_bytes -= kept.nbytes if kept is not None else 0
            running = self._running.pop(name, None)
            if running is not None:
                running[1].cancel()

    def _bound_kept(self) -> None:
        """Forget the oldest received groups beyond `keep_bytes`; those not yet received are bounded by credits."""
        if self._kept_bytes <= self._config.rollout.keep_bytes:
            return
        for name in [name for name, kept in self._kept.items() if kept.received]:
            self._kept_bytes -= self._kept.pop(name).nbytes
            if self._kept_bytes <= self._config.rollout.keep_bytes:
                return


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(callback)
