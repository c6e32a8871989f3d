"""One group in a worker: its samples are generated and scored side by side, and packed when all are there."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from miles_hpc.config.schema import Config
from miles_hpc.rollout.filters import Filter, FilterError
from miles_hpc.rollout.finished import InvalidSample, checked_arrays
from miles_hpc.rollout.generate import (
    GenerateContext,
    GenerateFunction,
    PromptTooLong,
    SampleTimeout,
    Services,
)
from miles_hpc.rollout.rewards import RewardError, RewardTimeout, Scorer, checked
from miles_hpc.rollout.sample import PartialSample, Sample, readable, sample_seed
from miles_hpc.rollout.statistics import group_stats
from miles_hpc.rollout.work_messages import RunGroup, Stage
from miles_hpc.transport.batch import LengthMismatch, SampleArrays, check_samples
from miles_hpc.transport.columns import SchemaError
from miles_hpc.wire.time_limit import within

log = logging.getLogger(__name__)

_BACKFILL = 1000
"""Seeds of samples that are generated again count from here, those of turns from 1."""


class GroupError(Exception):
    """A group that failed, with the reason that it is counted under."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class GroupInterrupted(Exception):
    """The group was interrupted; `partial` is what its samples have."""

    def __init__(self, partial: list[PartialSample]) -> None:
        super().__init__("interrupted")
        self.partial = partial


class GroupRun:
    """A running group.

    Args:
        order: what to run.
        generate: fills a sample.
        scorer: scores it.
        filters: which groups may be trained on.
        slots: of samples that run at once, over all groups of the worker; None: no bound.
    """

    def __init__(
        self,
        order: RunGroup,
        config: Config,
        services: Services,
        generate: GenerateFunction,
        scorer: Scorer,
        filters: Sequence[Filter] = (),
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self.order = order
        self.reward_calls = 0
        """Reward calls so far, for the failure rate."""
        self.stats: dict[str, float] = {}
        """What was counted of the finished samples."""
        self.categories: list[str] = []
        """Words that their rewards were sorted under, one for each; empty: there are none."""
        self._config = config
        self._services = services
        self._generate = generate
        self._scorer = scorer
        self._filters = filters
        self._slots = slots
        self._stages: dict[int, tuple[str, float]] = {}
        self._contexts: list[GenerateContext] = []
        self._arrays: dict[int, SampleArrays] = {}
        """By the identity of a finished sample, which lives as long as this."""
        self.interrupted = False

    def stage(self) -> Stage:
        """What the sample does that has been at one thing for longest."""
        now = time.monotonic()
        since, name = min(
            ((at, f"sample {index}: {what}") for index, (what, at) in self._stages.items()), default=(now, "wait")
        )
        return Stage(group=self.order.spec.id, stage=name, seconds=now - since)

    def interrupt(self) -> list[str]:
        """Let the samples end with what they have. Returns the ids of the requests that must be aborted for that."""
        self.interrupted = True
        return [rid for context in self._contexts for rid in context.interrupt()]

    async def run(self) -> list[SampleArrays]:
        """The finished group's samples, each packed when it ended.

        Raises:
            GroupError: a sample failed, and its siblings are cancelled; or a filter refused the group.
            GroupInterrupted: it was interrupted before all samples were finished.
        """
        samples = self._samples()
        finished = await (self._alone(samples[0]) if len(samples) == 1 else self._side_by_side(samples))
        if any(sample.status == "aborted" for sample in finished):
            raise GroupInterrupted(self._partial(finished))
        if self._group_reward:
            await self._score_group(finished)
        self._check_generations(finished)
        self._filter(finished)
        try:
            packed = [self._packed(sample) for sample in finished]
            check_samples(packed)
            self.stats = group_stats(finished)
            if any(sample.category for sample in finished):
                self.categories = [str(sample.category) for sample in finished]
        except (SchemaError, LengthMismatch, InvalidSample) as error:
            raise GroupError("invalid_sample", f"group {self.order.spec.id}: {error}") from error
        return packed

    def _partial(self, samples: list[Sample]) -> list[PartialSample]:
        # Several samples of one generation have one place to go on from: that generation begins anew.
        count = Counter(sample.index for sample in samples)
        try:
            return [PartialSample.of(sample) for sample in samples if count[sample.index] == 1]
        except (TypeError, ValueError) as error:  # samples that were given up are not checked
            raise GroupError("invalid_sample", f"group {self.order.spec.id}: {error}") from error

    def _packed(self, sample: Sample) -> SampleArrays:
        """A sample as columns: as it was when its generation ended, with its reward."""
        found = self._arrays.get(id(sample))
        arrays = checked_arrays(sample) if found is None else found
        reward = float("nan") if sample.reward is None else sample.reward
        return msgspec.structs.replace(arrays, reward=reward, status=sample.status)

    async def _alone(self, sample: Sample) -> list[Sample]:
        try:
            return await self._in_slot(sample)
        except Exception as error:
            raise GroupError(_reason(error), _text(sample, error)) from error

    async def _side_by_side(self, samples: list[Sample]) -> list[Sample]:
        tasks = [asyncio.ensure_future(self._in_slot(sample)) for sample in samples]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for sample, task in zip(samples, tasks, strict=True):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise GroupError(_reason(error), _text(sample, error)) from error
        return [sample for task in tasks for sample in task.result()]

    def _samples(self) -> list[Sample]:
        order, spec = self.order, self.order.spec
        samples = [
            Sample(
                group=spec.id,
                index=index,
                prompt_index=spec.prompt_index,
                epoch=spec.epoch,
                prompt=order.prompt.prompt,
                label=order.prompt.label,
                metadata=order.prompt.metadata,
                tools=order.prompt.tools,
                seed=sample_seed(self._config.seed, spec.epoch, spec.prompt_index, index),
                weight_version=order.weight_version,
                evaluation=order.evaluation,
            )
            for index in range(order.samples)
        ]
        for partial in spec.partial:
            if partial.index < len(samples):
                partial.restore(samples[partial.index], mask=self._config.rollout.mask_off_policy)
        return samples

    async def _in_slot(self, sample: Sample) -> list[Sample]:
        if self._slots is None:
            return await self._run_sample(sample)
        async with self._slots:
            return await self._run_sample(sample)

    async def _run_sample(self, sample: Sample) -> list[Sample]:
        def stage(name: str) -> None:
            self._stages[sample.index] = (name, time.monotonic())

        rollout = self._config.rollout
        tries = 1 + (rollout.backfills if rollout.on_failed_sample == "backfill" else 0)
        try:
            for number in range(tries):
                try:
                    finished = await self._generate_sample(sample, stage)
                    break
                except (PromptTooLong, asyncio.CancelledError):
                    raise
                except Exception as error:
                    if number + 1 == tries or self.interrupted:
                        raise
                    log.warning("generated again: %s", _text(sample, error).splitlines()[-1])
                    sample.reset(sample_seed(sample.seed, sample.epoch, sample.prompt_index, _BACKFILL + number))
            for one in finished:
                if one.status == "aborted":
                    continue
                if one.reward is not None:
                    one.reward = checked(one.reward)  # set by the generate function
                elif not self._group_reward:
                    stage("reward")
                    self.reward_calls += 1
                    one.reward = await self._scorer.score(one)
                    one.category = getattr(one.reward, "category", "")
            return finished
        finally:
            self._stages.pop(sample.index, None)

    @property
    def _group_reward(self) -> bool:
        return self._config.reward.scope == "group"

    async def _generate_sample(self, sample: Sample, stage: Callable[[str], None]) -> list[Sample]:
        """The samples of one generation, checked. One that is complete already is left as it is."""
        if sample.status in ("completed", "truncated"):
            return [sample]
        timeout_s = self._config.rollout.sample_timeout_s
        context = GenerateContext(self._services, timeout_s, stage, overrides=self.order.sampling)
        self._contexts.append(context)
        try:
            if self.interrupted:
                context.interrupt()
            stage("prompt")
            try:
                answer = await within(timeout_s, self._generate(sample, context))
            except asyncio.TimeoutError as error:
                if context.left_s > 0:
                    raise  # a timeout of the function's own
                doing = self._stages[sample.index][0]
                raise SampleTimeout(
                    f"not finished within rollout.sample_timeout_s = {timeout_s:g} s; at {doing!r}"
                ) from error
        finally:
            self._contexts.remove(context)
        finished: list[Sample] = [sample] if answer is None else answer if isinstance(answer, list) else [answer]
        if not finished:
            raise InvalidSample(f"sample {sample.index} of group {sample.group} became no sample at all")
        for one in finished:
            # All samples of one generation count as one in the group's statistics.
            one.index = sample.index
            one.response = readable(one.response)
            if one.status == "aborted" and self.interrupted:
                continue
            self._arrays[id(one)] = checked_arrays(one)
        return finished

    async def _score_group(self, samples: list[Sample]) -> None:
        self.reward_calls += 1
        try:
            rewards = await self._scorer.score_group(samples)
        except RewardError as error:
            raise GroupError(_reason(error), f"group {self.order.spec.id}: {error}") from error
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward, sample.category = reward, reward.category

    def _check_generations(self, samples: list[Sample]) -> None:
        """Samples of one generation are one answer and have one reward."""
        found: dict[int, float | None] = {}
        for sample in samples:
            if found.setdefault(sample.index, sample.reward) != sample.reward:
                raise GroupError(
                    "invalid_sample",
                    f"group {self.order.spec.id}: samples of generation {sample.index} have rewards "
                    f"{found[sample.index]} and {sample.reward}; they are one answer: set their reward in the generate "
                    f"function, or have them scored equally",
                )

    def _filter(self, samples: list[Sample]) -> None:
        if self.order.evaluation:
            return
        for one in self._filters:
            try:
                reason = one.refuses(samples)
            except FilterError as error:
                raise GroupError("filter_failed", f"group {self.order.spec.id}: {error}") from error
            if reason:
                raise GroupError(f"filtered_{reason}", f"group {self.order.spec.id} was filtered out: {reason}")


_REASONS: Sequence[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = (
    (PromptTooLong, "prompt_too_long"),
    (RewardTimeout, "reward_timeout"),
    (RewardError, "reward_failed"),
    (SampleTimeout, "generation_timeout"),
    ((InvalidSample, LengthMismatch, SchemaError), "invalid_sample"),
)


def _reason(error: BaseException) -> str:
    return next((reason for kinds, reason in _REASONS if isinstance(error, kinds)), "generation_failed")


def _text(sample: Sample, error: BaseException) -> str:
    known: Any = (PromptTooLong, RewardError, SampleTimeout, InvalidSample)
    text = str(error) if isinstance(error, known) else "".join(traceback.format_exception(error)).strip()
    return f"sample {sample.index} of group {sample.group} (prompt {sample.prompt_index}): {text}"
