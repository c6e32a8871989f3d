"""A rollout worker's process: `python -m miles_hpc.rollout.run_worker`, started by an agent."""

from __future__ import annotations

import asyncio
import sys

from miles_hpc.config.load import read_resolved
from miles_hpc.config.schema import Config
from miles_hpc.rollout.worker import AddressBook, RolloutWorker
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.program import collect_rarely, setup_logging, stop_signals
from miles_hpc.wire.worker_env import WorkerEnv


async def work(env: WorkerEnv, config: Config, hub: AddressBook) -> None:
    """Run groups until a signal."""
    worker = RolloutWorker(config, env, hub)
    collect_rarely()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    await worker.run()


def main() -> int:
    """Entry of the process."""
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    with HubClient(env, timing=config.timing) as hub:
        asyncio.run(work(env, config, hub))
    return 0


if __name__ == "__main__":
    sys.exit(main())
