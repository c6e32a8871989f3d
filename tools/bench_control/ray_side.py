"""The same questions to Ray, in its own interpreter. Prints one JSON object."""

import time

BEGUN = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

from processes import IDLE_S, below, kind_of, percentile, pss_mb, wait_until_readable  # noqa: E402

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
WINDOW, CALLS, DEATHS = 64, 2000, 10

import ray  # noqa: E402


@ray.remote
class Actor:
    def echo(self, params):
        return params

    def pid(self):
        return os.getpid()

    def block(self):
        threading.Event().wait()

    def start(self, path):
        self.child = subprocess.Popen(["bash", "-c", f'echo "$EPOCHREALTIME" > {path}; exec sleep 100000'])
        return self.child.pid


def main():
    place = Path(tempfile.mkdtemp())
    wall = time.time() - (time.perf_counter() - BEGUN)
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    starter = Actor.remote()
    child = ray.get(starter.start.remote(str(place / "started")))
    ready_s = wait_until_readable(place / "started", 60) - wall
    os.kill(child, 9)

    actor = Actor.remote()
    params = {"a": "b"}
    for _ in range(200):
        ray.get(actor.echo.remote(params))
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        ray.get(actor.echo.remote(params))
        times.append(time.perf_counter() - started)
    waiting, started = [], time.perf_counter()
    for _ in range(CALLS):
        waiting.append(actor.echo.remote(params))
        if len(waiting) == WINDOW:
            ray.get(waiting)
            waiting.clear()
    ray.get(waiting)
    per_s = CALLS / (time.perf_counter() - started)

    # The plane: everything that Ray runs beside this driver, the two actors' own processes left out. Workers that Ray
    # starts before anybody asks for them come, and go, in the seconds after the first actors.
    ours = {ray.get(actor.pid.remote()), ray.get(starter.pid.remote()), os.getpid()}
    time.sleep(IDLE_S)
    plane = {pid: kind_of(line) for pid, line in below(os.getpid()).items() if pid not in ours}
    sizes = {}
    for pid, kind in plane.items():
        sizes.setdefault(kind, []).append(pss_mb([pid]))
    total = pss_mb(list(plane))

    deaths = []
    for _ in range(DEATHS):
        victim = Actor.remote()
        pid = ray.get(victim.pid.remote())
        pending = victim.block.remote()
        seen = []

        def wait(pending=pending, seen=seen):
            try:
                ray.get(pending)
            except ray.exceptions.RayActorError:
                seen.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.2)
        killed = time.perf_counter()
        os.kill(pid, 9)
        waiter.join()
        deaths.append((seen[0] - killed) * 1e3)
    print(
        json.dumps(
            {
                "ray_rpc_p50_us": round(percentile(times, 50) * 1e6, 1),
                "ray_rpc_per_s": round(per_s),
                "ray_ready_s": round(ready_s, 3),
                "ray_pss_mb": total,
                "ray_processes": sizes,
                "ray_death_ms_p50": round(percentile(deaths, 50), 2),
            }
        )
    )
    sys.stdout.flush()
    ray.shutdown()


main()
