"""The real controller on an address book that never changes: `controller_side.py RUN_DIR RPC_PORT ENGINE_URL…`."""

import asyncio
import sys
from pathlib import Path

from miles_hpc.inference.http_session import open_http
from miles_hpc.inference.service import ControllerService
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation, cell_id
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.rpc import RpcServer


async def main():
    run_dir, port, urls = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    places = [url.removeprefix("http://").partition(":") for url in urls]
    pool = [
        CellAddrs(
            cell=cell_id("engine-policy-0", index),
            generation=Generation(1, 1),
            node="node-00000",
            ready=True,
            workers=[{"http": HostAndPort(host, int(http))}],
            meta={"gpu_offset": index},
        )
        for index, (host, _, http) in enumerate(places)
    ]
    async with open_http() as http:
        service = ControllerService(
            http, print, engines_wanted=len(urls), start_deadline_s=60.0, window_timeout_s=60.0, stall_s=45.0
        )
        service.on_pools({"engine-policy-0": pool})
        server = RpcServer(HostAndPort("127.0.0.1", port), service.methods(), run_dir, 0)
        await asyncio.gather(server.serve(), service.run())


if __name__ == "__main__":
    asyncio.run(main())
