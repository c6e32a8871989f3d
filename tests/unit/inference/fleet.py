"""The controller of one model with an address book that a test writes."""

import asyncio
import contextlib

import msgspec

from miles_hpc.inference.service import ControllerService
from miles_hpc.inference.weights import update_from_disk
from miles_hpc.inference.windows import Window
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs


class Fleet:
    """A service, its address book, and what it asked the hub for."""

    def __init__(self, http, **settings):
        self.replaced = []
        self.pools = {"engine-policy-0": [], "router-policy": []}
        values = {"engines_wanted": 2, "start_deadline_s": 20.0, "window_timeout_s": 20.0, "reconcile_s": 0.2}
        replace = lambda cell, generation, reason: self.replaced.append((cell, generation, reason))  # noqa: E731
        self.service = ControllerService(http, replace, **(values | settings))

    def put(self, pool, index, url, n=1, ready=True, model="policy"):
        address = HostAndPort.parse(url)
        cell = f"{pool}-{index:05d}"
        entry = CellAddrs(
            cell=cell,
            generation=Generation(1, n),
            node="node-00000",
            ready=ready,
            workers=[{"http": address}],
            meta={"gpu_offset": index, "model": model},
        )
        self.pools[pool] = [c for c in self.pools.get(pool, []) if c.cell != cell] + [entry]
        self.service.on_pools(self.pools)

    def drop(self, pool, index):
        self.pools[pool] = [c for c in self.pools[pool] if c.cell != f"{pool}-{index:05d}"]
        self.service.on_pools(self.pools)

    async def start(self, timeout_s=10.0):
        return msgspec.convert(await self.service.start_update_weights({"timeout_s": timeout_s}, []), Window)

    async def end(self, window, version, failed=None):
        params = {"window_id": window.window_id, "version": version, "path": f"/w/{version}", "failed": failed or {}}
        return await self.service.end_update_weights(params, [])

    async def publish(self, version, http):
        window = await self.start()
        result = await update_from_disk(window.engines, f"/w/{version}", version, http=http)
        await self.end(window, version, result.failed)

    async def serving(self, n, timeout_s=10.0):
        return await self.service.wait_serving({"n": n, "timeout_s": timeout_s}, [])


def run(parts, scenario, **settings):
    async def main():
        async with parts() as p:
            fleet = Fleet(p.http, **settings)
            running = asyncio.ensure_future(fleet.service.run(tick_s=0.05))
            try:
                return await asyncio.wait_for(scenario(p, fleet), 25)
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    return asyncio.run(main())


async def two_engines(p, fleet):
    router, engines = await p.router(), [await p.engine(), await p.engine()]
    fleet.put("router-policy", 0, router.url)
    for index, engine in enumerate(engines):
        fleet.put("engine-policy-0", index, engine.url)
    return router, engines


async def until(condition, timeout_s=5.0):
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not within the deadline"
        await asyncio.sleep(0.02)
