"""The inference controller's process: `python -m miles_hpc.inference.run_controller`, started by an agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from miles_hpc.config.load import read_resolved
from miles_hpc.config.schema import Config
from miles_hpc.inference.book import external_engines
from miles_hpc.inference.engine_api import EngineTooOld
from miles_hpc.inference.http_session import HttpKeys, http_keys, open_http
from miles_hpc.inference.published import PublishedFile
from miles_hpc.inference.router_api import RouterTooOld
from miles_hpc.inference.service import ControllerService, Handler
from miles_hpc.inference.windows import RPC_PORT, ControllerError
from miles_hpc.specs.models import ServedModel, served_models
from miles_hpc.specs.router import asks_for_key
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs, CellRow
from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.program import setup_logging
from miles_hpc.wire.rpc import RpcServer
from miles_hpc.wire.serving import stop_event, until_one_ends
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)


async def control(env: WorkerEnv, config: Config, hub: HubClient) -> None:
    """Serve until a signal, or until a part ends with an error, which is raised."""
    stop = stop_event()
    keys = http_keys(config, env.run_dir, env.attempt)
    beyond_help: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give_up(error: Exception) -> None:
        if not beyond_help.done():
            beyond_help.set_exception(error)

    async with open_http(keys) as http:
        holds = Holds(hub.hold_cells)
        services = {
            model.name: _service(env, config, hub, model, keys, http, holds, give_up) for model in served_models(config)
        }
        methods = by_model({name: one.methods() for name, one in services.items()}, config.model.name)
        server = RpcServer(env.listen[RPC_PORT], methods, env.run_dir, env.attempt)

        def on_pools(pools: Mapping[str, Sequence[CellAddrs]]) -> None:
            for service in services.values():
                service.on_pools(pools)

        async def follow() -> None:
            async for pools in hub.async_changes():
                on_pools(pools)

        on_pools(hub.pools)
        runs = [service.run() for service in services.values()]
        try:
            await until_one_ends(server.serve(), *runs, follow(), stop.wait(), beyond_help)
        except (EngineTooOld, RouterTooOld) as error:
            log.error("the run cannot go on: %s", error)
            await asyncio.to_thread(hub.finish, "failed", f"controller: {error}", {})


def _service(
    env: WorkerEnv,
    config: Config,
    hub: HubClient,
    model: ServedModel,
    keys: HttpKeys,
    http: aiohttp.ClientSession,
    holds: Holds,
    give_up: Callable[[Exception], None],
) -> ControllerService:
    settings = config.inference

    def worker_key(url: str) -> str:
        return keys.of(url) if asks_for_key(config) or url in keys.engines else ""

    return ControllerService(
        http,
        hub.replace_cell,
        engines_wanted=model.engines,
        worker_key=worker_key,
        stall_s=settings.stall_s,
        hold=holds.of(model.name),
        published=PublishedFile(env.run_dir, env.attempt, "" if model.name == config.model.name else model.name),
        start_deadline_s=settings.start_deadline_s,
        window_timeout_s=settings.window_timeout_s,
        model=model.name,
        updated=model.updated,
        external=external_engines(model.external),
        give_up=give_up,
        orders=HubOrders(env.run_dir, env.attempt),
    )


_LOOK_PATIENCE_S = 2.0
"""A look that waits for a lost hub holds up the end of this program; the next one comes soon."""


class HubOrders:
    """Orders to the hub, each over a connection of its own: calls come from threads."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._run_dir, self._attempt = run_dir, attempt

    def cells(self) -> list[CellRow]:
        """All cells of the run. Raises HubError."""
        with OperatorClient(self._run_dir, self._attempt, timeout_s=_LOOK_PATIENCE_S) as hub:
            return hub.cells()

    def stop_cell(self, cell: str, generation: Generation, reason: str = "") -> None:
        """Stop a generation until `start_cell`. Raises HubError."""
        with OperatorClient(self._run_dir, self._attempt) as hub:
            hub.stop_cell(cell, generation, reason)

    def start_cell(self, cell: str) -> None:
        """Start a stopped cell. Raises HubError."""
        with OperatorClient(self._run_dir, self._attempt) as hub:
            hub.start_cell(cell)


class Holds:
    """The hub knows one hold of the controller: what the windows of all models hold, together."""

    def __init__(self, tell: Callable[[Mapping[str, Generation], float], None]) -> None:
        self._tell = tell
        self._held: dict[str, tuple[dict[str, Generation], float]] = {}

    def of(self, model: str) -> Callable[[dict[str, Generation], float], None]:
        """What a model's service calls with its own cells; 0 seconds release them."""

        def hold(cells: dict[str, Generation], seconds: float) -> None:
            self._held[model] = (cells if seconds else {}, seconds)
            together = {cell: generation for held, _ in self._held.values() for cell, generation in held.items()}
            self._tell(together, max(seconds for _, seconds in self._held.values()))

        return hold


def by_model(methods: Mapping[str, Mapping[str, Handler]], policy: str) -> dict[str, Handler]:
    """Handlers that pass a call on to the model that its `model` names; the policy's without one."""

    def passed_on(name: str) -> Handler:
        async def call(params: dict[str, Any], frames: list[memoryview]) -> Any:
            model = params.get("model") or policy
            if model not in methods:
                raise ControllerError(f"no model {model!r} in this run: it has {', '.join(methods)}")
            return await methods[model][name](params, frames)

        return call

    return {name: passed_on(name) for name in methods[policy]}


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
