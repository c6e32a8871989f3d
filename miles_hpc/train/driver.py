"""The synchronous loop: generate, train, publish, commit, evaluate; the first weights before the first rollout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from miles_hpc.config.schema import Config
from miles_hpc.rollout.commits import CheckpointManifest, Commit, CommitLog
from miles_hpc.train.checkpoints import new_checkpoint, remove_old_checkpoints
from miles_hpc.train.progress import MetricsFile, RunSummary
from miles_hpc.train.ranks import Ranks
from miles_hpc.train.trainer import CheckpointRef

if TYPE_CHECKING:
    from miles_hpc.rollout.client import CommitData, EvalResult, RolloutResult

log = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_MARGIN = 1.5
"""A drain commits only when this many times the last save fits into the time that is left."""


class Executor(Protocol):
    """What the driver needs of an ExecutorClient."""

    async def open(self, incarnation: int, state: dict[str, Any] | None) -> dict[str, Any]: ...

    async def generate(self, rollout_id: int, weight_version: int) -> RolloutResult: ...

    async def evaluate(self, weight_version: int, limit: int = 0) -> EvalResult: ...

    async def prepare_commit(self, rollout_id: int) -> CommitData: ...

    async def committed(self, rollout_id: int) -> None: ...

    async def counts(self, *, final: bool = False) -> dict[str, Any]: ...


class Publisher(Protocol):
    """What the driver needs of a WeightPublisher."""

    async def publish(self, above: int) -> int: ...


class Hub(Protocol):
    """What the driver tells the hub, and asks it."""

    def on_progress(self, summary: RunSummary) -> None: ...

    @property
    def healed(self) -> int: ...

    @property
    def trainer_generation(self) -> str: ...

    def drain_left(self) -> float | None:
        """Seconds until the hub stops everything; None while the run does not drain."""

    async def until_drained(self) -> None:
        """Returns once the run drains."""


Track = Callable[[int, dict[str, Any]], None]


class Driver:
    """One run of the loop, from the newest commit to the last step. Steps count from 1; rollout n is step n's.

    Raises (run): whatever a part raises; nothing that was committed is lost by that.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        *,
        hub: Hub,
        executor: Executor,
        ranks: Ranks,
        publisher: Publisher,
        commits: CommitLog,
        metrics: MetricsFile,
        track: Track = lambda step, row: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._attempt = attempt
        self._hub = hub
        self._executor = executor
        self._ranks = ranks
        self._publisher = publisher
        self._commits = commits
        self._metrics = metrics
        self._track = track
        self._clock = clock
        self._version = 0
        self._committed = 0
        self._save_s = 0.0
        self._kept: list[str] = []
        self._evaluated: dict[str, float] = {}
        self.summary = RunSummary({}, 0, {})

    async def run(self) -> RunSummary:
        """Do every step that is left, or, once the run drains, make what is done durable (`summary.drained`)."""
        start = self._commits.open()
        self.summary = RunSummary(start.extra, start.step, start.counts)
        self._version, self._committed = start.weight_version, start.step
        if not await self._unless_drained(self._begin(start)):
            self.summary.drained = "before its first step"
            return self.summary
        for step in range(start.step + 1, self._config.steps + 1):
            if self._hub.drain_left() is not None or not await self._step(step):
                await self._stop_early()
                break
        self.summary.counts = await self._executor.counts(final=True)
        return self.summary

    async def _unless_drained(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What the work returns, or None when the run drains before it is done: then it is given up."""
        done, drained = asyncio.ensure_future(work), asyncio.ensure_future(self._hub.until_drained())
        try:
            await asyncio.wait((done, drained), return_when=asyncio.FIRST_COMPLETED)
            return done.result() if done.done() else None
        finally:
            drained.cancel()
            done.cancel()
            # What was given up ends before anything else begins; how it ends no longer matters.
            await asyncio.gather(drained, done, return_exceptions=True)

    async def _stop_early(self) -> None:
        """Commit the steps that are done, if there is time for it."""
        step, left = self.summary.step, self._hub.drain_left() or 0.0
        if self._committed < step and left < SAVE_MARGIN * self._save_s:
            self.summary.drained = (
                f"{left:.1f} s are too short for a save ({self._save_s:.1f} s): steps {self._committed + 1} to {step} "
                "will be done again"
            )
            return
        if self._committed < step:
            await self._commit(step)
        self.summary.drained = f"step {step} is committed" if step else "before its first step"

    async def _begin(self, start: Commit) -> bool:
        """Bring executor, trainer and engines to the state of a commit, or to the start of the run."""
        checkpoint = None if start.checkpoint is None else CheckpointRef.of(start.checkpoint, self._run_dir)
        if start.checkpoint is not None:
            self._kept = [start.checkpoint.path]
        where = f"step {start.step}" if checkpoint else "the start"
        log.info("incarnation %d goes on from %s", start.incarnation, where)
        await self._executor.open(start.incarnation, start.data_state)
        await self._ranks.init(start.incarnation, checkpoint)
        if checkpoint is None and self._config.train.warm_start is not None:
            log.info("warm start: %s", await self._ranks.warm_start())
        await self._publish()
        # A run that ended between its last commit and its last evaluation has only this left to do.
        if self._evaluates and start.step in (0, self._config.steps):
            await self._evaluate(start.step)
        self._hub.on_progress(self.summary)
        return True

    async def _step(self, step: int) -> bool:
        """Do one step. False: the run drains, and the rollout that was under way is given up."""
        seconds: dict[str, float] = {}
        started = self._clock()

        def lap(name: str) -> None:
            nonlocal started
            now = self._clock()
            seconds[name] = round(now - started, 4)
            started = now

        result = await self._unless_drained(self._executor.generate(step, self._version))
        if result is None:
            return False
        lap("rollout")
        learned = await self._ranks.train(step)
        lap("train")
        await self._publish()
        lap("update")
        self.summary.on_step(step, result.reward_mean)
        last = step == self._config.steps
        if last or self._every(self._config.train.save_every, step):
            await self._commit(step)
        lap("save")
        heldout = None
        if self._evaluates and (last or self._every(self._config.eval.every, step)):
            heldout = await self._evaluate(step)
            lap("evaluate")
        self.summary.counts = await self._executor.counts()
        row = {
            "step": step,
            "attempt": self._attempt,
            "reward": result.reward_mean,
            "tokens": result.tokens,
            "tokens_per_s": round(result.tokens / seconds["rollout"], 1) if seconds["rollout"] else 0.0,
            "weight_version": self._version,
            "healed": self._hub.healed,
            **learned,
            "seconds": seconds,
            "rollout": result.metrics,
        }
        if heldout is not None:
            row |= {"heldout": heldout, "eval": self._evaluated}
        self._metrics.append(row)
        self._hub.on_progress(self.summary)
        self._track(step, row)
        return True

    @property
    def _evaluates(self) -> bool:
        asks = not self._config.rollout.load_debug  # otherwise there is no engine to answer
        return asks and bool(self._config.data.heldout or self._config.eval.datasets)

    @staticmethod
    def _every(interval: int, step: int) -> bool:
        return bool(interval) and step % interval == 0

    async def _publish(self) -> None:
        self._version = await self._publisher.publish(self._version)
        self.summary.weight_version = self._version

    async def _evaluate(self, step: int) -> float:
        found = await self._executor.evaluate(self._version, self._config.eval.limit)
        self.summary.on_evaluation(found.accuracy)
        self._evaluated = found.metrics
        log.info("step %d: held-out accuracy %.3f of %d prompts", step, found.accuracy, found.n)
        return found.accuracy

    async def _commit(self, step: int) -> None:
        """Make everything up to `step` durable: checkpoint first, then the link that names it."""
        began = self._clock()
        path = new_checkpoint(self._run_dir, step, self._hub.trainer_generation)
        files = await self._ranks.save(path)
        manifest = CheckpointManifest(path=str(path.relative_to(self._run_dir)), step=step, files=files)
        data = await self._executor.prepare_commit(step)
        self._commits.append(
            step=step,
            weight_version=self._version,
            checkpoint=manifest,
            data_state=data.data_state,
            counts=data.counts,
            ledger=data.ledger,
            extra=self.summary.to_extra(),
        )
        self._committed, self._save_s = step, self._clock() - began
        await self._executor.committed(step)
        self._kept = [*self._kept, manifest.path][-self._config.train.keep_checkpoints :]
        remove_old_checkpoints(self._run_dir, self._kept)
