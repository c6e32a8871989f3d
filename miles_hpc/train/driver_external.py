"""The driver of `mode = "external"`: your own trainer pulls batches and publishes weights, through `miles_hpc.connect`;
of `mode = "eval"`, which evaluates the start model and ends; and of `mode = "rollout"`, which generates every step with
that model.

This driver generates a rollout, waits until every rank of the trainer has acknowledged it, and writes the commit. It
serves the trainer's calls, and says in `<run_dir>/external.json` where.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_hpc.config.schema import Config
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.http_session import http_keys
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.rollout.client import ExecutorClient, RolloutResult, executor_address
from miles_hpc.rollout.commits import Commit, CommitLog
from miles_hpc.train.progress import MetricsFile, RunSummary
from miles_hpc.train.publish import WeightPublisher
from miles_hpc.train.trainer import sync_tree
from miles_hpc.wire.rpc import RpcServer
from miles_hpc.wire.time_limit import within

if TYPE_CHECKING:
    from miles_hpc.wire.client import HubClient
    from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)

FILE = "external.json"
_PROGRESS_S = 10.0
_LONGEST_ANSWER_S = 60.0
"""A call that waits is answered after this long, and made again."""


class ExternalTrainerError(RuntimeError):
    """The trainer's calls do not fit together; the text says which."""


class ExternalDriver:
    """One run. Steps count from 1; rollout n is step n's.

    Raises (run): whatever a part raises; nothing that was committed is lost by that.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        hub: HubClient,
        executor: ExecutorClient,
        publisher: WeightPublisher,
        commits: CommitLog,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._attempt = attempt
        self._hub = hub
        self._executor = executor
        self._publisher = publisher
        self._commits = commits
        self._metrics = MetricsFile(run_dir)
        self._version = 0
        self._source = ""
        self._incarnation = 0
        self._ready = 0
        """Newest rollout that may be pulled."""
        self._committed = 0
        self._ranks = 0
        self._acked: dict[int, dict[str, Any]] = {}
        self._ended = ""
        self._changed = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self.summary = RunSummary({}, 0, {})

    def methods(self) -> dict[str, Any]:
        """What the `rpc` port serves."""
        return {"hello": self.hello, "next": self.next, "ack": self.ack, "publish": self.publish}

    @property
    def source(self) -> str:
        """Directory that the next version is copied from."""
        return self._source

    async def run(self) -> RunSummary:
        """Do every step that is left."""
        start = self._commits.open()
        self.summary = RunSummary(start.extra, start.step, start.counts)
        self._version, self._committed, self._incarnation = start.weight_version, start.step, start.incarnation
        await self._executor.open(start.incarnation, start.data_state)
        kept = str(start.extra.get("weights") or "")
        await self._publish(kept if kept and Path(kept).is_dir() else self._config.model.path)
        if self._config.mode == "eval":
            if not await self._unless_drained(self._evaluate()):
                self.summary.drained = "the evaluation had not ended, and nothing of it is kept: start it again"
            return self.summary
        if self._config.mode == "external":
            await self._announce(start)
        for step in range(start.step + 1, self._config.steps + 1):
            begun = time.monotonic()
            result = await self._unless_drained(self._executor.generate(step, self._version))
            if result is None:
                break
            generated = time.monotonic()
            await self._set(ready=step)
            if self._config.mode == "external" and not await self._unless_drained(self._all_ranks(step)):
                break
            await self._commit(step, result, generated - begun, time.monotonic() - generated)
        else:
            await self._set(ended="finished")
        if not self._ended:
            self.summary.drained = f"step {self._committed} is committed"
            await self._set(ended="drained")
        self.summary.counts = await self._executor.counts(final=True)
        return self.summary

    async def _evaluate(self) -> bool:
        found = await self._executor.evaluate(self._version, self._config.eval.limit)
        self.summary.on_evaluation(found.accuracy)
        for name, value in found.metrics.items():
            log.info("%s = %.4f", name, value)
        self._metrics.append({"step": 0, "attempt": self._attempt, "heldout": found.accuracy, "eval": found.metrics})
        return True

    async def _set(self, *, ready: int = 0, ended: str = "") -> None:
        async with self._changed:
            self._ready, self._ended = ready or self._ready, ended or self._ended
            self._changed.notify_all()

    async def _unless_drained(self, work: Any) -> Any:
        done = asyncio.ensure_future(work)
        drained = asyncio.ensure_future(self._hub.async_until_drained())
        try:
            await asyncio.wait((done, drained), return_when=asyncio.FIRST_COMPLETED)
            return done.result() if done.done() else None
        finally:
            for task in (done, drained):
                task.cancel()
            await asyncio.gather(done, drained, return_exceptions=True)

    async def _all_ranks(self, step: int) -> bool:
        """Wait until every rank has acknowledged a rollout."""
        deadline = time.monotonic() + self._config.train.external_timeout_s
        while True:
            async with self._changed:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(
                        _PROGRESS_S,
                        self._changed.wait_for(lambda: self._ranks and len(self._acked) == self._ranks),
                    )
                    return True
            here = f"{len(self._acked)} of {self._ranks or '?'} ranks have acknowledged rollout {step}"
            if time.monotonic() > deadline:
                raise ExternalTrainerError(
                    f"{here} within train.external_timeout_s = {self._config.train.external_timeout_s:g} s: "
                    f"is the trainer that called miles_hpc.connect alive?"
                )
            log.info("waiting for the trainer: %s", here)

    async def _commit(self, step: int, result: RolloutResult, rollout_s: float, train_s: float) -> None:
        data = await self._executor.prepare_commit(step)
        told = self._acked.get(0, {})
        self.summary.on_step(step, result.reward_mean)
        extra = {**self.summary.to_extra(), "weights": self._source, "checkpoint": told.get("checkpoint", "")}
        self._commits.append(
            step=step,
            weight_version=self._version,
            checkpoint=None,
            data_state=data.data_state,
            counts=data.counts,
            ledger=data.ledger,
            extra=extra,
        )
        await self._executor.committed(step)
        async with self._changed:
            self._committed, self._acked = step, {}
            self._changed.notify_all()
        self.summary.counts = await self._executor.counts()
        self.summary.weight_version = self._version
        self._metrics.append(
            {
                "step": step,
                "attempt": self._attempt,
                "reward": result.reward_mean,
                "tokens": result.tokens,
                "tokens_per_s": round(result.tokens / max(rollout_s, 1e-6), 1),
                "weight_version": self._version,
                "healed": self._hub.healed,
                **told.get("metrics", {}),
                "seconds": {"rollout": round(rollout_s, 4), "train": round(train_s, 4)},
                "rollout": result.metrics,
            }
        )
        from miles_hpc.train.run_driver import HubLink

        HubLink(self._hub).on_progress(self.summary)

    async def _publish(self, path: str) -> int:
        async with self._publishing:
            self._source = path
            self._version = await self._publisher.publish(self._version)
            self.summary.weight_version = self._version
            # What engines may load again after a restart is our copy, not the trainer's directory.
            self._source = str(self._publisher.path_of(self._version))
            return self._version

    async def _announce(self, start: Commit) -> None:
        address = executor_address(self._hub)
        assert address is not None
        content = {
            "attempt": self._attempt,
            "incarnation": self._incarnation,
            "driver": self._hub.env.listen["rpc"].netloc,
            "executor": address.netloc,
            "step": start.step,
            "steps": self._config.steps,
            "checkpoint": start.extra.get("checkpoint", ""),
        }
        path = self._run_dir / FILE
        draft = path.with_name(f".{FILE}.{os.getpid()}")
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        draft.replace(path)

    # ------------------------------------------------------------------------------------------ trainer
    def _check(self, params: Any) -> None:
        if params["incarnation"] != self._incarnation:
            raise ExternalTrainerError(
                f"StaleIncarnation: this call is of incarnation {params['incarnation']}, the run is in "
                f"{self._incarnation}"
            )
        size, rank = params["dp_size"], params["dp_rank"]
        if self._ranks not in (0, size) or not 0 <= rank < size:
            raise ExternalTrainerError(
                f"rank {rank} of {size} called; the first one said dp_size {self._ranks or size}"
            )
        self._ranks = size

    async def hello(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """Where the run stands."""
        return {"incarnation": self._incarnation, "step": self._committed, "ended": self._ended}

    async def next(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """Wait a while for a rollout after `after`: {rollout}, {ended}, or {} when there is none yet."""
        self._check(params)
        after, rank = params["after"], params["dp_rank"]
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await within(
                    min(params["timeout_s"], _LONGEST_ANSWER_S),
                    self._changed.wait_for(
                        lambda: self._ended or (self._ready > max(after, self._committed) and rank not in self._acked)
                    ),
                )
        if self._ready > max(after, self._committed) and rank not in self._acked:
            return {"rollout": self._ready}
        return {"ended": self._ended} if self._ended else {}

    async def ack(self, params: Any, frames: list[memoryview]) -> None:
        """A rank is done with a rollout; returns once it is committed, or after a while. A repeat changes nothing."""
        self._check(params)
        rollout = params["rollout"]
        async with self._changed:
            if rollout > self._committed:
                if rollout != self._ready:
                    raise ExternalTrainerError(f"rollout {rollout} is acknowledged; the run is at {self._ready}")
                self._acked[params["dp_rank"]] = {
                    "checkpoint": params.get("checkpoint", ""),
                    "metrics": params.get("metrics", {}),
                }
                self._changed.notify_all()

    async def publish(self, params: Any, frames: list[memoryview]) -> int:
        """Bring an HF model directory into all engines; returns its version."""
        self._check(params)
        path = Path(params["path"])
        if not (path / "config.json").is_file():
            raise ExternalTrainerError(f"{path} holds no config.json; expected a HF model directory on a shared path")
        return await self._publish(str(path))


def _copy_model(source: Path, target: Path, model: Path) -> None:
    """A copy of a model directory; tokenizer and template files that it lacks are the start model's."""
    shutil.copytree(source, target)
    for path in model.iterdir():
        text = path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in path.name
        if text and not (target / path.name).exists():
            shutil.copy2(path, target / path.name)
    sync_tree(target)


async def drive_external(env: WorkerEnv, config: Config, hub: HubClient) -> RunSummary:
    """The whole run. What it raises carries the summary so far to `DriverFailed`."""
    from miles_hpc.train.run_driver import DriverFailed

    executor, controller = ExecutorClient(hub), ControllerClient(hub)
    made: list[ExternalDriver] = []

    async def export(path: Path) -> None:
        await asyncio.to_thread(_copy_model, Path(made[0].source), path, Path(config.model.path))

    try:
        publisher = WeightPublisher(
            env.run_dir,
            {"attempt": env.attempt, "driver": str(env.generation)},
            controller,
            export,
            functools.partial(
                update_from_disk,
                pause_mode=config.inference.pause_mode,
                key=http_keys(config, env.run_dir, env.attempt),
            ),
            max(config.inference.window_timeout_s, config.inference.start_deadline_s),
        )
        commits = CommitLog(
            env.run_dir, attempt=env.attempt, epoch=env.generation.epoch, generation=str(env.generation)
        )
        driver = ExternalDriver(config, env.run_dir, env.attempt, hub, executor, publisher, commits)
        made.append(driver)
        if config.mode != "external":
            try:
                return await driver.run()
            except Exception as error:
                raise DriverFailed(driver.summary) from error
        server = asyncio.ensure_future(RpcServer(env.listen["rpc"], driver.methods(), env.run_dir, env.attempt).serve())
        running = asyncio.ensure_future(driver.run())
        try:
            await asyncio.wait((server, running), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                server.result()
            summary = running.result()
            # Ranks that wait for a next rollout are told that there is none.
            await asyncio.sleep(0.2)
            return summary
        except Exception as error:
            raise DriverFailed(driver.summary) from error
        finally:
            for task in (server, running):
                task.cancel()
            await asyncio.gather(server, running, return_exceptions=True)
    finally:
        for client in (executor, controller):
            await client.close()
