"""Evaluation: held-out data sets, never mixed with training; the rows lie in `<run_dir>/eval/`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_hpc.config.schema import Config
from miles_hpc.rollout.client import EvalResult
from miles_hpc.rollout.collect import Collector, RolloutFailed
from miles_hpc.rollout.convert import Generations
from miles_hpc.rollout.data import Prompts, keys_of, open_prompts
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.groups import Gathered, Group
from miles_hpc.rollout.metrics import pass_at_k
from miles_hpc.rollout.producer import progress
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.rollout.statistics import stat_metrics
from miles_hpc.rollout.work_messages import EvalSampling, RunGroup
from miles_hpc.transport.batch import STATUSES, RolloutBatch

log = logging.getLogger(__name__)

HELDOUT = "heldout"


@dataclass(frozen=True)
class _DataSet:
    name: str
    prompts: Prompts
    samples: int
    sampling: EvalSampling | None
    limit: int


class Evaluator:
    """The data sets of `data.heldout` and `[eval.datasets]`.

    Raises:
        DataError: a file cannot be used.
    """

    def __init__(self, config: Config, run_dir: Path, dispatcher: Dispatcher) -> None:
        self._run_dir = run_dir
        self._dispatcher = dispatcher
        keys = keys_of(config.data)
        self._sets: list[_DataSet] = []
        if config.data.heldout:
            self._sets.append(_DataSet(HELDOUT, open_prompts(config.data.heldout, keys), 1, None, 0))
        for name, one in config.eval.datasets.items():
            sampling = EvalSampling(
                temperature=one.temperature,
                top_p=one.top_p,
                max_response_tokens=one.max_response_tokens,
                generate=one.generate,
            )
            self._sets.append(_DataSet(name, open_prompts(one.data, keys), one.samples, sampling, one.limit))

    @property
    def heldout(self) -> int:
        """Prompts of `data.heldout`."""
        return sum(len(one.prompts) for one in self._sets if one.name == HELDOUT)

    async def run(self, incarnation: int, number: int, weight_version: int, limit: int) -> EvalResult:
        """Evaluate all data sets side by side.

        Args:
            limit: prompts of each, unless it says its own; 0: all.

        Raises:
            RolloutFailed: there is no data set, or no prompt of the first could be scored.
        """
        if not self._sets:
            raise RolloutFailed("there are no held-out prompts; set data.heldout or [eval.datasets]")
        started = time.monotonic()
        collector = Collector(f"evaluation {number}")
        orders = {}
        for place, one in enumerate(self._sets):
            rows = min(one.limit or limit or len(one.prompts), len(one.prompts))
            for row in range(rows):
                name = f"eval-{number:05d}-{place:02d}-i{row:09d}"
                orders[name] = RunGroup(
                    incarnation=incarnation,
                    spec=GroupSpec(id=name, epoch=0, index=row, prompt_index=row),
                    prompt=one.prompts[row],
                    samples=one.samples,
                    weight_version=weight_version,
                    evaluation=True,
                    sampling=one.sampling,
                )
        try:
            self._dispatcher.dispatch(list(orders.values()), collector, counted=False)
            while collector.open:
                await progress(collector, self._dispatcher)
        finally:
            self._dispatcher.settle(list(orders), "done")
        return self._result(number, weight_version, orders, collector, time.monotonic() - started)

    def _result(
        self,
        number: int,
        weight_version: int,
        orders: Mapping[str, RunGroup],
        collector: Collector,
        seconds: float,
    ) -> EvalResult:
        metrics: dict[str, float] = {}
        first: tuple[float, int, int] | None = None
        for place, one in enumerate(self._sets):
            asked = [name for name in orders if name.startswith(f"eval-{number:05d}-{place:02d}-")]
            found = {name: collector.results[name] for name in asked if name in collector.results}
            failed = len(asked) - len(found)
            if not found and first is None:
                raise RolloutFailed(
                    f"{collector.what}: all {len(asked)} prompts of {one.name} failed. The last failure: "
                    f"{collector.last_failure}"
                )
            metrics |= {f"{one.name}/{name}": value for name, value in _summary(found, failed).items()}
            mean = metrics.get(f"{one.name}/reward", 0.0)
            first = first or (mean, sum(len(batch) for batch in found.values()), failed)
            self._write(one.name, number, weight_version, orders, found)
        assert first is not None
        return EvalResult(accuracy=first[0], n=first[1], failed=first[2], seconds=seconds, metrics=metrics)

    def _write(
        self,
        data_set: str,
        number: int,
        weight_version: int,
        orders: Mapping[str, RunGroup],
        found: Mapping[str, Group],
    ) -> None:
        directory = self._run_dir / "eval"
        directory.mkdir(exist_ok=True)
        path = directory / f"{weight_version:05d}-{data_set}.jsonl"
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with draft.open("w", encoding="utf-8", errors="replace") as file:
            for name, group in found.items():
                batch = group.batch
                for row in range(len(batch)):
                    file.write(json.dumps(_row(orders[name], batch, row), ensure_ascii=False) + "\n")
        draft.replace(path)


def _row(order: RunGroup, batch: RolloutBatch, row: int) -> dict[str, Any]:
    return {
        "prompt_index": order.spec.prompt_index,
        "sample": int(batch.sample_index[row]),
        "prompt": order.prompt.prompt,
        "label": order.prompt.label,
        "response": batch.text("response", row),
        "reward": float(batch.rewards[row]),
        "status": STATUSES[int(batch.status[row])],
        "tokens": int(batch.loss_mask[int(batch.offsets[row]) : int(batch.offsets[row + 1])].sum()),
    }


def _summary(found: Mapping[str, Group], failed: int) -> dict[str, float]:
    if not found:
        return {"failed": float(failed)}
    gathered = Gathered.of(list(found.values()))
    generations = Generations(gathered)
    status = np.concatenate([batch.status for batch in gathered.batches])
    tokens = sum(int(batch.loss_mask.sum(dtype=np.int64)) for batch in gathered.batches)
    return {
        "reward": float(generations.rewards.mean()),
        "failed": float(failed),
        "truncated": float((status == STATUSES.index("truncated")).mean()),
        "response_tokens_mean": tokens / len(status),
        **stat_metrics(list(found.values())),
        **pass_at_k(generations),
    }
