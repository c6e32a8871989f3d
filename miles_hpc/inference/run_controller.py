"""The inference controller's process: `python -m miles_hpc.inference.run_controller`, started by an agent."""

from __future__ import annotations

import asyncio
import logging

from miles_hpc.config.load import read_resolved
from miles_hpc.config.schema import Config
from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.published import PublishedFile
from miles_hpc.inference.service import ControllerService
from miles_hpc.inference.windows import RPC_PORT
from miles_hpc.specs.engine import total_engines
from miles_hpc.specs.router import asks_for_key
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.program import setup_logging
from miles_hpc.wire.rpc import RpcServer
from miles_hpc.wire.security import load_http_key
from miles_hpc.wire.serving import stop_event, until_one_ends
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)


async def control(env: WorkerEnv, config: Config, hub: HubClient) -> None:
    """Serve until a signal, or until a part ends with an error, which is raised."""
    stop = stop_event()
    settings = config.inference
    key = load_http_key(env.run_dir, env.attempt)
    async with open_http(key) as http:
        service = ControllerService(
            http,
            hub.replace_cell,
            engines_wanted=total_engines(config),
            worker_key=key if asks_for_key(config) else "",
            stall_s=settings.stall_s,
            hold=hub.hold_cells,
            published=PublishedFile(env.run_dir, env.attempt),
            start_deadline_s=settings.start_deadline_s,
            window_timeout_s=settings.window_timeout_s,
        )
        server = RpcServer(env.listen[RPC_PORT], service.methods(), env.run_dir, env.attempt)

        async def follow() -> None:
            async for pools in hub.async_changes():
                service.on_pools(pools)

        service.on_pools(hub.pools)
        await until_one_ends(server.serve(), service.run(), follow(), stop.wait())


def main() -> None:
    """Entry of the process."""
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    with HubClient(env) as hub:
        asyncio.run(control(env, config, hub))
    log.info("controller stopped")


if __name__ == "__main__":
    main()
