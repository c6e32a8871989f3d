"""How the groups of a rollout come about: on demand (mode sync), or all the time within a bound (mode async)."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from miles_hpc.config.schema import Config
from miles_hpc.rollout.collect import Collector, RolloutFailed
from miles_hpc.rollout.data import DataSource, DataState
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.groups import Group
from miles_hpc.rollout.sample import GroupSpec, PartialSample, Status
from miles_hpc.rollout.statistics import stats_to_keep
from miles_hpc.rollout.work_messages import RunGroup
from miles_hpc.transport.batch import STATUSES, RolloutBatch
from miles_hpc.wire.time_limit import within

log = logging.getLogger(__name__)

PROGRESS_S = 10.0
_INTERRUPT_S = 15.0
"""Until interrupted groups must have sent what they have; others begin anew."""

MakeOrder = Callable[[GroupSpec, int], RunGroup]
"""From a place in the data order and the weight version that is current."""


@dataclass(frozen=True)
class Produced:
    """The groups of a rollout, in the order of their ids."""

    specs: list[GroupSpec]
    groups: list[Group]
    place: DataState
    """Where the data order stands once exactly these and all earlier rollouts are used."""
    metrics: dict[str, float]


class Producer(Protocol):
    """What the executor asks for groups."""

    async def produce(self, rollout_id: int, version: int) -> Produced:
        """The groups of the next rollout. What it raises leaves every prompt in the data order."""

    async def reset(self) -> None:
        """Forget all work; the dispatcher has begun another incarnation."""


async def progress(collector: Collector, dispatcher: Dispatcher) -> None:
    """Wait for a change, with a line every 10 s that says what is waited for."""
    while True:
        try:
            return await within(PROGRESS_S, collector.wait())
        except asyncio.TimeoutError:
            waiting = [f"{name}: {dispatcher.where(name)}" for name in sorted(collector.open)[:3]]
            done = len(collector.results)
            log.info("%s: %d groups done, %d open; %s", collector.what, done, len(collector.open), "; ".join(waiting))


def status_of(code: int) -> Status:
    """The status of a finished sample by its code in a batch."""
    return "truncated" if STATUSES[code] == "truncated" else "completed"


def partial_of(
    batch: RolloutBatch, categories: Sequence[str] = (), stats: Mapping[str, float] | None = None, *, rewards: bool
) -> list[PartialSample]:
    """Finished samples as what a group can go on from; nothing where a PartialSample cannot hold what they are.

    Args:
        categories: words that the rewards were sorted under; empty: there are none.
        stats: what was counted of them together.
        rewards: keep them; off where a reward function of the whole group gave them, which is asked again.
    """
    if batch.extra or len(np.unique(batch.sample_index)) < len(batch):
        return []
    return [
        PartialSample(
            index=int(batch.sample_index[row]),
            status=status_of(int(batch.status[row])),
            token_ids=one.token_ids.tolist(),
            loss_mask=one.loss_mask.tolist(),
            logprobs=one.logprobs.tolist(),
            versions=[(int(v), int(a), int(b)) for v, a, b in one.spans.tolist()],
            response=one.text("response", 0),
            reward=float(batch.rewards[row]) if rewards else None,
            category=categories[row] if categories and rewards else "",
            # Added up again later, so that it does not matter which sample has them.
            stats=stats_to_keep(stats or {}) if row == 0 else {},
        )
        for row in range(len(batch))
        for one in [batch.slice(row, row + 1)]
    ]


class _Shared:
    """What both ways have in common."""

    def __init__(
        self, config: Config, source: DataSource, rows: int, dispatcher: Dispatcher, make_order: MakeOrder
    ) -> None:
        self._config = config
        self._source = source
        self._rows = rows
        self._dispatcher = dispatcher
        self._make_order = make_order

    def _submit(self, specs: Sequence[GroupSpec], version: int, collector: Collector) -> None:
        self._dispatcher.dispatch([self._make_order(spec, version) for spec in specs], collector)

    def _check(self, collector: Collector) -> None:
        rollout = self._config.rollout
        collector.check(
            batch_size=rollout.batch_size,
            samples=rollout.samples_per_prompt,
            max_failure_rate=self._config.reward.max_failure_rate,
            rows=self._rows,
            max_filtered_batches=rollout.max_filtered_batches,
        )


class SyncProducer(_Shared):
    """Begins `over_sampling` times as many groups as a rollout needs, and returns what is left over.

    With `rollout.partial`, what is left over keeps its tokens; finished surplus is not generated again.
    """

    async def produce(self, rollout_id: int, version: int) -> Produced:
        rollout = self._config.rollout
        target = math.ceil(rollout.batch_size * rollout.over_sampling)
        collector = Collector(f"rollout {rollout_id}")
        specs: dict[str, GroupSpec] = {}
        begun = 0
        try:
            while len(collector.results) < rollout.batch_size:
                # Dropped groups are replaced by the next prompts, so that a batch is always full.
                fresh = self._source.next(max(0, target - len(collector.results) - len(collector.open)))
                begun += len(fresh)
                specs |= {group.id: group for group in fresh}
                self._submit(fresh, version, collector)
                await progress(collector, self._dispatcher)
                self._check(collector)
            names = sorted(list(collector.results)[: rollout.batch_size])
            await self._return_rest(collector, specs, set(names))
        except BaseException:
            self._give_back([specs[name] for name in (*collector.open, *collector.results)])
            raise
        return Produced(
            specs=[specs[name] for name in names],
            groups=[collector.results[name] for name in names],
            place=self._source.state(),
            metrics={
                "groups_begun": float(begun),
                "groups_returned": float(begun - len(names) - collector.dropped.total()),
                **{f"dropped_{reason}": float(count) for reason, count in sorted(collector.dropped.items())},
            },
        )

    async def _return_rest(self, collector: Collector, specs: dict[str, GroupSpec], used: set[str]) -> None:
        if self._config.rollout.partial and collector.open:
            deadline = time.monotonic() + _INTERRUPT_S
            asked = set(self._dispatcher.interrupt(collector.open))
            while (asked & collector.open) and time.monotonic() < deadline:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(deadline - time.monotonic(), collector.wait())
        rest = [name for name in (*collector.open, *collector.results, *collector.partial) if name not in used]
        partial = dict(collector.partial)
        if self._config.rollout.partial:
            rewards = self._config.reward.scope != "group"
            finished = {name: collector.results[name] for name in rest if name in collector.results}
            partial |= {
                name: partial_of(group.batch, group.categories, group.stats, rewards=rewards)
                for name, group in finished.items()
            }
        self._give_back(
            [msgspec.structs.replace(specs[name], partial=partial.get(name, specs[name].partial)) for name in rest]
        )

    def _give_back(self, unused: list[GroupSpec]) -> None:
        self._dispatcher.settle([group.id for group in unused], "returned")
        self._source.give_back(unused)

    async def reset(self) -> None:
        """Nothing outlives a call."""


class AsyncProducer(_Shared):
    """Generates ahead of the trainer: with `v` rollouts trained, `(max_staleness + v + 1) x batch_size` groups may have
    been begun and not dropped, as https://arxiv.org/abs/2505.24298 bounds it. Workers' credits bound what runs at once.

    Of the finished groups the oldest are taken first. One whose oldest token is more than `max_staleness` versions
    behind is dropped and counted, or generated anew; either way another one is begun in its place.
    """

    def __init__(
        self, config: Config, source: DataSource, rows: int, dispatcher: Dispatcher, make_order: MakeOrder
    ) -> None:
        super().__init__(config, source, rows, dispatcher, make_order)
        self._begin()

    def _begin(self) -> None:
        self._collector = Collector("the buffer")
        self._specs: dict[str, GroupSpec] = {}
        self._versions: list[int] = []
        self._calls = 0
        self._taken = 0
        self._stale = 0
        self._last_stale = ""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def reset(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._begin()

    async def produce(self, rollout_id: int, version: int) -> Produced:
        self._collector.what = f"rollout {rollout_id}"
        if not self._versions or version > self._versions[-1]:
            self._versions.append(version)
        self._calls += 1
        size = self._config.rollout.batch_size
        try:
            self._fill()
            if self._task is None:
                self._task = asyncio.ensure_future(self._keep_filling())
            async with self._changed:
                while self._fresh() < size:
                    if self._task.done():
                        self._task.result()
                    self._fill()
                    self._check(self._collector)
                    self._check_stale()
                    await self._changed.wait()
        except BaseException:
            # A call that is given up is made again, for the same rollout.
            self._calls -= 1
            raise
        # The oldest go first: what waits another step may be too old then. Equally old ones go in arrival order.
        oldest_first = sorted(self._collector.results.items(), key=lambda item: -self._staleness(item[1]))
        taken = dict(oldest_first[:size])
        for name in taken:
            del self._collector.results[name]
        names = sorted(taken)
        specs = [self._specs.pop(name) for name in names]
        self._taken += len(names)
        produced = Produced(
            specs=specs, groups=[taken[name] for name in names], place=self._place(), metrics=self._metrics(taken)
        )
        self._collector.dropped.clear()
        self._collector.reward_calls = self._collector.reward_failures = 0
        return produced

    async def _keep_filling(self) -> None:
        try:
            while True:
                await progress(self._collector, self._dispatcher)
                self._fill()
                async with self._changed:
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _fill(self) -> None:
        rollout, collector = self._config.rollout, self._collector
        ahead = (rollout.max_staleness + max(0, self._calls - 1) + 1) * rollout.batch_size
        room = ahead - self._taken - len(collector.results) - len(collector.open)
        if len(self._specs) > len(collector.results) + len(collector.open):
            self._specs = {
                name: spec for name, spec in self._specs.items() if name in collector.results or name in collector.open
            }
        if room > 0 and self._versions:
            fresh = self._source.next(room)
            self._specs |= {group.id: group for group in fresh}
            self._submit(fresh, self._versions[-1], collector)

    def _staleness(self, group: Group) -> int:
        """Versions that the oldest token is behind the newest one published; 0 where none is known."""
        if group.oldest < 0:
            return 0
        at = bisect.bisect_left(self._versions, group.oldest)
        return max(0, len(self._versions) - 1 - at)

    def _fresh(self) -> int:
        """Groups that may be trained on now; the others are dropped or given back first."""
        limit = self._config.rollout.max_staleness
        stale = [name for name, group in self._collector.results.items() if self._staleness(group) > limit]
        retry = self._config.rollout.on_stale == "retry"
        for name in stale:
            del self._collector.results[name]
            spec = self._specs.pop(name)
            self._stale += 1
            self._last_stale = name
            if retry:
                self._dispatcher.settle([name], "returned")
                self._source.give_back([spec])
            else:
                self._dispatcher.settle([name], "dropped", "stale")
        return len(self._collector.results)

    def _check_stale(self) -> None:
        """Raises RolloutFailed when everything that is generated is too old, as when engines keep their weights."""
        rollout = self._config.rollout
        if self._stale > (rollout.max_filtered_batches + rollout.max_staleness + 1) * rollout.batch_size:
            raise RolloutFailed(
                f"{self._collector.what}: {self._stale} groups were more than rollout.max_staleness = "
                f"{rollout.max_staleness} weight versions behind {self._versions[-1]}, at last {self._last_stale}: the "
                f"engines do not take new weights, or a group takes longer than so many steps: raise "
                f"rollout.max_staleness"
            )

    def _place(self) -> DataState:
        state = self._source.state()
        waiting = [
            spec
            for name, spec in self._specs.items()
            if name in self._collector.results or name in self._collector.open
        ]
        buffer = sorted([*state.buffer, *waiting], key=lambda group: (group.epoch, group.index))
        return DataState(epoch=state.epoch, offset=state.offset, buffer=buffer)

    def _metrics(self, taken: dict[str, Group]) -> dict[str, float]:
        staleness = [self._staleness(group) for group in taken.values()]
        waiting = [self._staleness(group) for group in self._collector.results.values()]
        found = {
            "buffer_groups": float(len(self._collector.results)),
            "running_groups": float(len(self._collector.open)),
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": float(max(staleness)),
            "buffer_staleness_max": float(max(waiting, default=0)),
            "stale_groups": float(self._stale),
        }
        self._stale = 0
        return found | {f"dropped_{reason}": float(n) for reason, n in sorted(self._collector.dropped.items())}
