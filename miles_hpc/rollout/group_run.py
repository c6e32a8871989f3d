"""One group in a worker: its samples are generated and scored side by side, and packed when all are there."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_hpc.config.schema import Config
from miles_hpc.rollout.generate import GenerateContext, GenerateFunction, PromptTooLong, SampleTimeout, Services
from miles_hpc.rollout.rewards import RewardError, RewardTimeout, Scorer
from miles_hpc.rollout.sample import Sample, sample_seed
from miles_hpc.rollout.work_messages import RunGroup, Stage
from miles_hpc.transport.batch import LengthMismatch, RolloutBatch, SampleArrays
from miles_hpc.transport.columns import SchemaError


class InvalidSample(ValueError):
    """A generate function returned a sample that cannot be trained on; the text names it by its index."""


class GroupRun:
    """A running group.

    Args:
        order: what to run.
        generate: fills a sample.
        scorer: scores it.
    """

    def __init__(
        self, order: RunGroup, config: Config, services: Services, generate: GenerateFunction, scorer: Scorer
    ) -> None:
        self.order = order
        self.reward_calls = 0
        """Reward calls so far, for the failure rate."""
        self._config = config
        self._services = services
        self._generate = generate
        self._scorer = scorer
        self._stages: dict[int, tuple[str, float]] = {}

    def stage(self) -> Stage:
        """What the slowest sample does."""
        name, since = min(self._stages.values(), key=lambda stage: stage[1], default=("wait", time.monotonic()))
        return Stage(group=self.order.spec.id, stage=name, seconds=time.monotonic() - since)

    async def run(self) -> RolloutBatch:
        """The finished group.

        Raises:
            GroupError: a sample failed; its siblings are cancelled.
        """
        samples = self._samples()
        tasks = [asyncio.ensure_future(self._run_sample(sample)) for sample in samples]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for sample, task in zip(samples, tasks, strict=True):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise GroupError(_reason(error), _text(sample, error)) from error
        try:
            return RolloutBatch.pack([task.result() for task in tasks])
        except SchemaError as error:
            raise GroupError("invalid_sample", f"group {self.order.spec.id}: {error}") from error

    def _samples(self) -> list[Sample]:
        order, spec = self.order, self.order.spec
        return [
            Sample(
                group=spec.id,
                index=index,
                prompt_index=spec.prompt_index,
                epoch=spec.epoch,
                prompt=order.prompt.prompt,
                label=order.prompt.label,
                metadata=order.prompt.metadata,
                seed=sample_seed(self._config.seed, spec.epoch, spec.prompt_index, index),
                weight_version=order.weight_version,
                evaluation=order.evaluation,
            )
            for index in range(order.samples)
        ]

    async def _run_sample(self, sample: Sample) -> SampleArrays:
        def stage(name: str) -> None:
            self._stages[sample.index] = (name, time.monotonic())

        timeout_s = self._config.rollout.sample_timeout_s
        context = GenerateContext(self._services, timeout_s, stage)
        try:
            stage("prompt")
            try:
                await asyncio.wait_for(self._generate(sample, context), timeout_s)
            except asyncio.TimeoutError as error:
                if context.left_s > 0:
                    raise  # a timeout of the function's own
                doing = self._stages[sample.index][0]
                raise SampleTimeout(
                    f"not finished within rollout.sample_timeout_s = {timeout_s:g} s; at {doing!r}"
                ) from error
            check_sample(sample)
            stage("reward")
            self.reward_calls += 1
            sample.reward = await self._scorer.score(sample)
            return as_arrays(sample)
        finally:
            self._stages.pop(sample.index, None)


class GroupError(Exception):
    """A group that failed, with the reason that it is counted under."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def check_sample(sample: Sample) -> None:
    """Raises InvalidSample unless its columns fit together and its log-probs are finite."""
    where = f"sample {sample.index} of group {sample.group}"
    tokens = len(sample.token_ids)
    if not tokens:
        raise InvalidSample(f"{where} has no tokens, not even a prompt: its generate function did not fill it")
    for name, column in (("loss_mask", sample.loss_mask), ("logprobs", sample.logprobs)):
        if len(column) != tokens:
            raise InvalidSample(f"{where} has {tokens} tokens but {name} has {len(column)}; expected {tokens}")
    if sample.status not in ("completed", "truncated"):
        raise InvalidSample(f"{where} has status {sample.status!r}; expected completed or truncated")
    finite = np.isfinite(np.asarray(sample.logprobs, np.float32))
    if not finite.all():
        raise InvalidSample(f"{where} has a log-prob that is not finite at token {int(np.argmin(finite))}")


def as_arrays(sample: Sample) -> SampleArrays:
    """Token columns become arrays when a sample ends, so that packing a group touches no Python list."""
    packed = RolloutBatch.pack([sample.arrays()])
    return SampleArrays(
        token_ids=packed.token_ids,
        loss_mask=packed.loss_mask,
        logprobs=packed.logprobs,
        reward=float(packed.rewards[0]),
        versions=sample.versions,
        status=sample.status,
        sample_index=sample.index,
        prompt_index=sample.prompt_index,
        texts={"response": sample.response},
    )


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
