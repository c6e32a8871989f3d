"""The executor's process: `python -m miles_hpc.rollout.run_executor`, started by an agent."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from miles_hpc.config.load import read_resolved
from miles_hpc.config.schema import Config
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.executor import Executor
from miles_hpc.rollout.published import PublishedVersions
from miles_hpc.transport.carriers import Outbox
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.program import collect_rarely, setup_logging
from miles_hpc.wire.rpc import RpcServer
from miles_hpc.wire.serving import stop_event, until_one_ends
from miles_hpc.wire.worker_env import WorkerEnv


async def execute(env: WorkerEnv, config: Config, hub: HubClient) -> None:
    """Serve until a signal, or until a part ends with an error, which is raised."""
    stop = stop_event()
    published = PublishedVersions(env.run_dir)
    dispatcher = Dispatcher(
        env.listen["work"],
        env.run_dir,
        env.attempt,
        lease_s=config.timing.dead,
        is_published=(lambda version: True) if config.rollout.load_debug else published.contains,
    )
    outbox = Outbox(env.listen["bulk"])
    with contextlib.closing(dispatcher), contextlib.closing(outbox):
        executor = Executor(config, env.attempt, env.run_dir, dispatcher, outbox, published)
        collect_rarely()
        server = RpcServer(env.listen["rpc"], executor.methods(), env.run_dir, env.attempt)

        async def follow() -> None:
            async for pools in hub.async_changes():
                dispatcher.on_pools(pools)

        await until_one_ends(server.serve(), dispatcher.run(), follow(), stop.wait())


def main() -> int:
    """Entry of the process."""
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    with HubClient(env, timing=config.timing) as hub:
        asyncio.run(execute(env, config, hub))
    return 0


if __name__ == "__main__":
    sys.exit(main())
