"""A real rollout worker whose address book is one executor: `worker.py RUN_DIR INDEX HOST PORT [ROUTER_PORT]`."""

import asyncio
import os
import sys
from pathlib import Path

from miles_hpc.config.load import read_resolved
from miles_hpc.rollout.run_worker import work
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation, cell_id, worker_id
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.worker_env import WorkerEnv

FIRST = Generation(1, 1)


def cell(pool, index, ports):
    name = cell_id(pool, index)
    return CellAddrs(cell=name, generation=FIRST, node="node-00000", ready=True, workers=[ports])


def env(run_dir, pool, index):
    return WorkerEnv(
        run_dir=run_dir,
        attempt=0,
        worker=worker_id(cell_id(pool, index), 0),
        pool=pool,
        cell_index=index,
        worker_index=0,
        generation=FIRST,
        node="node-00000",
        listen={"bulk": HostAndPort("127.0.0.1", 0)},
        master={},
        cell_size=1,
    )


class Book:
    def __init__(self, pools):
        self.pools = pools

    def on_change(self, callback):
        return lambda: None


def main():
    run_dir, index, host, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    pools = {"executor": [cell("executor", 0, {"work": HostAndPort(host, port)})]}
    if len(sys.argv) > 5:
        pools["router-policy"] = [cell("router-policy", 0, {"http": HostAndPort(host, int(sys.argv[5]))})]
    if os.environ.get("BENCH_PROFILE") and index == 0:
        import cProfile

        profile = cProfile.Profile()
        try:
            profile.runcall(
                asyncio.run, work(env(run_dir, "rollout-worker", index), read_resolved(run_dir), Book(pools))
            )
        finally:
            profile.dump_stats(os.environ["BENCH_PROFILE"])
        return
    asyncio.run(work(env(run_dir, "rollout-worker", index), read_resolved(run_dir), Book(pools)))


if __name__ == "__main__":
    main()
