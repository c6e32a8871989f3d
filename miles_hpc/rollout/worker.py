"""The rollout worker: runs groups for the executor, and keeps what it finished until it is committed or superseded."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
    Done,
    FreeGroups,
    GroupFailed,
    GroupPartial,
    GroupsDone,
    GroupsReceived,
    InterruptGroups,
    RunGroup,
    SendInline,
    ToWorker,
    WorkBeat,
    WorkHello,
    WorkWelcome,
)
from miles_hpc.rollout.work_socket import WorkLink
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.carriers import Outbox, ParcelRef
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.time_limit import within
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)

BEAT_S = 1.0
_PROGRESS_S = 10.0
_STAGES = 32
"""Groups whose stage goes with a beat."""
_LARGE = 128 * 1024
"""Bytes of a group that stays in shared memory for the executor to fetch; smaller ones are sent, encrypted."""
_SEGMENTS = 512
"""Groups that stay there at most: each takes a file descriptor."""
_TOGETHER = 1 << 20
"""Bytes of small groups in one message."""
_WARM_BYTES = 256 << 20
"""Of freed segments that are kept for the next groups."""


class AddressBook(Protocol):
    """What the worker needs of a HubClient."""

    @property
    def pools(self) -> dict[str, list[CellAddrs]]: ...

    def on_change(self, callback: Callable[[dict[str, list[CellAddrs]]], None]) -> Callable[[], None]: ...


@dataclass
class _Kept:
    """A finished or failed group, held for replay: a small one as its samples, a large one as a parcel."""

    message: Done | GroupPartial | GroupFailed
    nbytes: int = 0
    samples: Sequence[SampleArrays] = ()
    ref: ParcelRef | None = None
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
        reward = config.reward
        self._scorer = Scorer(
            reward.function,
            timeout_s=reward.timeout_s,
            url=reward.url,
            batch_size=reward.batch_size if reward.scope == "batch" else 0,
            batch_wait_s=reward.batch_wait_s,
        )
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
        self._unsent: list[str] = []
        listen = env.listen.get("bulk")
        self._outbox = None if listen is None else Outbox(listen, keep_bytes=_WARM_BYTES)
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
                    await within(BEAT_S, self._wake.wait())
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
        if self._outbox is not None:
            self._outbox.close()
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
            oldest = [run.stage() for run, _ in itertools.islice(self._running.values(), _STAGES)]
            self._link.send(WorkBeat(incarnation=self._incarnation, running=list(self._running), oldest=oldest))
        # An engine that had not got a request yet knew nothing of its abort.
        self._abort([rid for run, _ in self._running.values() if run.interrupted for rid in run.interrupt()])

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
            case GroupsReceived(incarnation=self._incarnation):
                for name in message.groups:
                    if name in self._kept:
                        self._kept[name].received = True
                self._bound_kept()
            case SendInline(incarnation=self._incarnation):
                self._send_inline(message.groups)
            case FreeGroups(incarnation=self._incarnation):
                self._forget(message.groups, reuse=message.reason == "committed")
            case InterruptGroups() | GroupsReceived() | SendInline() | FreeGroups() | BeatSeen():
                pass

    def _on_welcome(self, message: WorkWelcome) -> None:
        if message.incarnation != self._incarnation:
            log.info("training incarnation %d; %d groups dropped", message.incarnation, len(self._running))
            self._forget([*self._running, *self._kept])
            self._incarnation = message.incarnation
        if not self._welcomed:
            self._welcomed = True
            # What an earlier connection may have lost; the executor drops what it has by the group's id.
            for name, kept in self._kept.items():
                if not kept.received:
                    self._send_soon(name)

    def _on_run(self, order: RunGroup) -> None:
        name = order.spec.id
        if order.incarnation != self._incarnation or name in self._running:
            return
        if name in self._kept:
            self._kept[name].received = False  # what an executor took that is gone does not count
            self._send_soon(name)
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
        self._abort([rid for name in groups if name in self._running for rid in self._running[name][0].interrupt()])

    def _abort(self, rids: Sequence[str]) -> None:
        if rids:
            task = asyncio.ensure_future(self._services.abort(rids))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _run(self, run: GroupRun) -> None:
        name, incarnation = run.order.spec.id, run.order.incarnation
        try:
            samples = await run.run()
        except GroupInterrupted as interrupted:
            partial = GroupPartial(incarnation=incarnation, group=name, samples=interrupted.partial)
            self._finish(run, _Kept(partial))
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
            self._finish(run, _Kept(failed))
        except asyncio.CancelledError:
            if self._stopping or self._failure is not None or not self._is_running(run):
                raise
            # Not by us: left alone, the group would count as running for ever.
            text = f"group {name} was cancelled from inside, by its generate or reward function"
            failed = GroupFailed(
                incarnation=incarnation,
                group=name,
                reason="generation_failed",
                text=text,
                reward_calls=run.reward_calls,
            )
            log.warning("group failed (%s): %s", failed.reason, text)
            self._finish(run, _Kept(failed))
        except Exception as error:  # a bug here, not in the user's functions: end, and be started anew
            self._fail(error)
        else:
            calls = 0 if run.order.evaluation else run.reward_calls
            try:
                done = Done(name, len(samples), calls, run.stats, run.categories)
                self._finish(run, self._packed(done, samples))
            except Exception as error:  # nobody awaits this task
                self._fail(error)

    # ------------------------------------------------------------------------------------------ keeping
    def _packed(self, done: Done, samples: Sequence[SampleArrays]) -> _Kept:
        nbytes = sum(sample.nbytes for sample in samples)
        if nbytes >= _LARGE and self._outbox is not None and self._outbox.held < _SEGMENTS:
            try:
                return _Kept(done, nbytes, ref=self._outbox.offer(RolloutBatch.packing_of(samples)))
            except OSError as error:
                log.warning("no shared memory for a group of %d bytes, it is sent inline: %s", nbytes, error)
        return _Kept(done, nbytes, samples)

    def _is_running(self, run: GroupRun) -> bool:
        running = self._running.get(run.order.spec.id)
        return running is not None and running[0] is run

    def _finish(self, run: GroupRun, kept: _Kept) -> None:
        name = run.order.spec.id
        if not self._is_running(run):
            # It was cancelled, and a function of the user's took no notice.
            self._release(kept)
            return
        del self._running[name]
        self._kept[name] = kept
        self._kept_bytes += kept.nbytes
        self._send_soon(name)

    def _send_soon(self, name: str) -> None:
        """Send a group at the end of this turn of the loop, with all others that are ready by then."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_unsent)
        self._unsent.append(name)

    def _send_unsent(self) -> None:
        try:
            self._send_ready()
        except Exception as error:  # the loop would only log it, and these groups would never be sent
            self._fail(error)

    def _send_ready(self) -> None:
        names, self._unsent = self._unsent, []
        if self._link is None or not self._welcomed:
            return  # the next welcome finds them
        small: dict[tuple[object, ...], list[_Kept]] = {}
        for name in dict.fromkeys(names):
            kept = self._kept.get(name)
            if kept is None:
                continue
            if not isinstance(kept.message, Done):
                self._link.send(kept.message)
            elif kept.ref is not None:
                self._link.send(GroupsDone(incarnation=self._incarnation, groups=[kept.message], ref=kept.ref))
            else:
                # Only samples with the same columns fit into one batch.
                small.setdefault(kept.samples[0].layout, []).append(kept)
        for same in small.values():
            nbytes, first = 0, 0
            for place, kept in enumerate(same):
                nbytes += kept.nbytes
                if nbytes >= _TOGETHER or place == len(same) - 1:
                    self._send_together(self._link, same[first : place + 1])
                    nbytes, first = 0, place + 1

    def _send_together(self, link: WorkLink, groups: Sequence[_Kept]) -> None:
        samples = [sample for kept in groups for sample in kept.samples]
        done = [kept.message for kept in groups if isinstance(kept.message, Done)]
        link.send(GroupsDone(incarnation=self._incarnation, groups=done), RolloutBatch.packing_of(samples).to_bytes())

    def _send_inline(self, groups: Sequence[str]) -> None:
        """The executor cannot reach the bulk port: what it asks for goes over the connection that it has."""
        for name in groups:
            kept = self._kept.get(name)
            if kept is None or kept.ref is None or not isinstance(kept.message, Done):
                continue
            assert self._link is not None and self._outbox is not None
            parcel = self._outbox.memory(kept.ref)
            if parcel is not None:
                self._link.send(GroupsDone(incarnation=self._incarnation, groups=[kept.message]), bytes(parcel))

    def _forget(self, groups: Sequence[str], *, reuse: bool = False) -> None:
        """Stop or free groups.

        Args:
            reuse: the executor reads them no longer, so their memory may be filled anew.
        """
        for name in groups:
            self._drop(name, reuse=reuse)
            running = self._running.pop(name, None)
            if running is not None:
                running[1].cancel()

    def _drop(self, name: str, *, reuse: bool) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._kept_bytes -= kept.nbytes
        self._release(kept, reuse=reuse)

    def _release(self, kept: _Kept, *, reuse: bool = False) -> None:
        if kept.ref is not None and self._outbox is not None:
            self._outbox.release(kept.ref, reuse=reuse)

    def _bound_kept(self) -> None:
        """Forget the oldest received groups beyond `keep_bytes`; those not yet received are bounded by credits."""
        if self._kept_bytes <= self._config.rollout.keep_bytes:
            return
        for name in [name for name, kept in self._kept.items() if kept.received]:
            self._drop(name, reuse=False)
            if self._kept_bytes <= self._config.rollout.keep_bytes:
                return


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(callback)
