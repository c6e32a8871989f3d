"""The driver's process: `python -m miles_hpc.train.run_driver`, started by an agent. Its end is the end of the run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time

from miles_hpc.config.load import read_resolved
from miles_hpc.config.schema import Config
from miles_hpc.inference.client import ControllerClient
from miles_hpc.inference.http_session import http_keys
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.rollout.client import ExecutorClient
from miles_hpc.rollout.commits import CommitLog
from miles_hpc.train.driver import Driver
from miles_hpc.train.progress import MetricsFile, RunSummary
from miles_hpc.train.publish import WeightPublisher
from miles_hpc.train.ranks import POOL as TRAINER_POOL
from miles_hpc.train.ranks import RankClients
from miles_hpc.train.tracking import Trackers
from miles_hpc.wire.client import HubClient, HubError, Pools
from miles_hpc.wire.messages import Progress
from miles_hpc.wire.program import setup_logging
from miles_hpc.wire.rpc import RpcError
from miles_hpc.wire.time_limit import within
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)

_LAST_COUNTS_S = 5.0
"""How long a failed driver waits for the executor's counts."""
_REASON_CHARS = 2000


class HubLink:
    """The driver's view of the hub."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub

    def on_progress(self, summary: RunSummary) -> None:
        """Tell how far the run is; does not wait."""
        part = summary.to_dict()
        self._hub.progress(Progress(step=summary.step, weight_version=summary.weight_version, summary=part))

    @property
    def healed(self) -> int:
        """Cells started again so far in this attempt."""
        return self._hub.healed

    @property
    def trainer_generation(self) -> str:
        """Which start of the trainer cell writes a checkpoint now."""
        return str(self._hub.pools[TRAINER_POOL][0].generation)

    def drain_left(self) -> float | None:
        """Seconds until the hub stops everything; None while the run does not drain."""
        return self._hub.drain_left()

    async def until_drained(self) -> None:
        """Returns once the run drains."""
        await self._hub.async_until_drained()


async def wait_for_parts(hub: HubClient, config: Config) -> None:
    """Wait until executor, controller and all trainer ranks serve.

    Raises:
        WaitTimeout: naming the first that does not.
    """
    deadline = time.monotonic() + config.timing.start_deadline
    parts = [("executor", "the executor")]
    if not config.rollout.load_debug:
        parts.append(("controller", "the controller"))
    if config.mode in ("sync", "async"):
        parts.append((TRAINER_POOL, "the trainer"))
    for pool, what in parts:
        left = max(0.0, deadline - time.monotonic())
        await hub.async_wait_for(functools.partial(_ready, pool), what, left)


def _ready(pool: str, pools: Pools) -> bool:
    cells = pools.get(pool) or []
    return bool(cells) and cells[0].ready


async def drive(env: WorkerEnv, config: Config, hub: HubClient) -> RunSummary:
    """The whole run. What it raises carries the summary so far to `DriverFailed`."""
    await wait_for_parts(hub, config)
    if config.mode not in ("sync", "async"):
        from miles_hpc.train.driver_external import drive_external

        return await drive_external(env, config, hub)
    executor = ExecutorClient(hub)
    controller = None if config.rollout.load_debug else ControllerClient(hub)
    ranks = RankClients(hub, config.train.ranks)
    try:
        publisher = WeightPublisher(
            env.run_dir,
            {"attempt": env.attempt, "driver": str(env.generation)},
            controller,
            ranks.export_weights,
            ranks.send_weights
            if config.train.weight_transfer == "distributed"
            else functools.partial(
                update_from_disk,
                pause_mode=config.inference.pause_mode,
                key=http_keys(config, env.run_dir, env.attempt),
            ),
            max(config.inference.window_timeout_s, config.inference.start_deadline_s),
        )
        commits = CommitLog(
            env.run_dir, attempt=env.attempt, epoch=env.generation.epoch, generation=str(env.generation)
        )
        with Trackers(config, env.run_dir) as trackers:
            driver = Driver(
                config,
                env.run_dir,
                env.attempt,
                hub=HubLink(hub),
                executor=executor,
                ranks=ranks,
                publisher=publisher,
                commits=commits,
                metrics=MetricsFile(env.run_dir),
                track=trackers.log,
            )
            try:
                return await driver.run()
            except Exception as error:
                with contextlib.suppress(RpcError, asyncio.TimeoutError):
                    driver.summary.counts = await within(_LAST_COUNTS_S, executor.counts(final=True))
                raise DriverFailed(driver.summary) from error
    finally:
        for client in (executor, controller, ranks):
            if client is not None:
                await client.close()


class DriverFailed(Exception):
    """The loop raised; the cause says what, `summary` how far it had come."""

    def __init__(self, summary: RunSummary) -> None:
        super().__init__(f"failed after step {summary.step}")
        self.summary = summary


def main() -> int:
    """Entry of the process. 0: the run is finished; 1: it failed, and the hub knows why."""
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    with HubClient(env, timing=config.timing) as hub:
        try:
            summary = asyncio.run(drive(env, config, hub))
        except Exception as error:
            summary_part = error.summary.to_dict() if isinstance(error, DriverFailed) else {}
            cause = error.__cause__ if isinstance(error, DriverFailed) and error.__cause__ else error
            log.error("the run failed", exc_info=cause)
            reason = " ".join(f"driver: {type(cause).__name__}: {cause}".split())[:_REASON_CHARS]
            with contextlib.suppress(HubError):
                hub.finish("failed", reason, summary_part)
            return 1
        if summary.drained and hub.draining is not None:
            hub.finish("drained", f"{hub.draining.reason}; {summary.drained}", summary.to_dict())
        else:
            hub.finish("finished", "", summary.to_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
