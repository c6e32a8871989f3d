"""Stands in for every program of a run: `stub.py -m MODULE …`. Serves its ports; the driver plays a script.

STUB_DRIVER: `finish` (two steps, then done), `wait` (steps until it is told to stop), `raise`.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path

from miles_hpc.wire.address import HostAndPort


def serve() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ports = json.loads(os.environ["MILES_HPC_LISTEN"])
    for address in map(HostAndPort.parse, ports.values()):
        server = http.server.ThreadingHTTPServer((address.host, address.port), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def drive() -> None:
    from miles_hpc.config.load import read_resolved
    from miles_hpc.specs.compute import compute_specs
    from miles_hpc.wire.client import HubClient
    from miles_hpc.wire.messages import Progress
    from miles_hpc.wire.worker_env import WorkerEnv

    env = WorkerEnv.from_environ()
    script = os.environ["STUB_DRIVER"]
    config = read_resolved(env.run_dir)
    steps = config.steps
    cells = sum(spec.scheduling.num_cells for spec in compute_specs(config, env.run_dir))
    with HubClient(env) as hub:
        hub.wait_for(lambda pools: sum(c.ready for pool in pools.values() for c in pool) == cells or None, "all", 30)
        if script == "raise":
            raise ValueError("the script says so")
        for step in range(1, steps + 1):
            write_step(env.run_dir, env.attempt, step)
            hub.progress(Progress(step=step, weight_version=step + 1, summary=summary(step)))
        if script == "wait":
            (env.run_dir / "driver-waits").touch()
            threading.Event().wait()
        hub.finish("finished", "", summary(steps))
        threading.Event().wait()


def write_step(run_dir: Path, attempt: int, step: int) -> None:
    row = {
        "step": step,
        "attempt": attempt,
        "reward": step / 10,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "weight_version": step + 1,
        "healed": 0,
        "seconds": {"rollout": 0.1, "train": 0.1, "update": 0.0, "save": 0.0},
    }
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def summary(step: int) -> dict:
    return {
        "steps": step,
        "reward": {"first": 0.1, "last": step / 10, "best": step / 10},
        "heldout": {"first": None, "last": None},
        "groups": {"dispatched": 8 * step, "committed": 8 * step, "returned": 0, "dropped": {}},
    }


if __name__ == "__main__":
    if sys.argv[2] == "miles_hpc.train.run_driver":
        drive()
    else:
        serve()
