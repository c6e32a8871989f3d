"""How soon is a lost engine out of the router and its replacement started, and a killed router back with all engines?

A whole run of `smoke`, started as a user would; the times are taken from outside, from the moment of the SIGKILL.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.sockets import HubError

ENGINES = 3
PATIENCE_S = 60.0
SETTINGS = (
    "steps=1000000",
    f"inference.engines={ENGINES}",
    "inference.fake_token_ms=50",
    "heal.budget=1000",
    "heal.quarantine=0",
    "heal.backoff_s=0",
)
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Run:
    """The run, as an operator sees it."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        words = [sys.executable, "-m", "miles_hpc.cli", "run", "smoke", "--run-dir", str(run_dir)]
        for text in SETTINGS:
            words += ["--set", text]
        self._out = run_dir.with_suffix(".out").open("wb")
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._out, start_new_session=True
        )

    def ready(self, pool):
        """Cell -> (its row, its url), once all of a pool are ready; else None."""
        try:
            with OperatorClient(self.run_dir, timeout_s=2.0) as operator:
                status = operator.status()
        except (HubError, OSError):
            return None
        hosts = {node.node: node.address for node in status.nodes}
        rows = [row for row in status.cells if row.pool == pool]
        if not rows or any(row.state != "ready" for row in rows):
            return None
        return {row.cell: (row, f"http://{hosts[row.node]}:{row.workers[0].ports['http']}") for row in rows}

    def row(self, cell):
        with OperatorClient(self.run_dir, timeout_s=2.0) as operator:
            return next(row for row in operator.cells() if row.cell == cell)

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._out.close()


def until(condition, what, pause_s=0.005):
    """Its first value that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(pause_s)
    return found


def healthy(router):
    """Urls that a router lists as healthy; None while it does not answer."""
    with contextlib.suppress(OSError), _direct.open(f"{router}/workers", timeout=5) as answer:
        return {worker["url"] for worker in json.loads(answer.read())["workers"] if worker["is_healthy"]}
    return None


def started_s(run, cell, old, killed_at):
    """Seconds from the kill to the start of the process that comes in place of pid `old`, by the kernel's clock of
    seconds since the boot, in ticks of 10 ms."""

    def fresh():
        workers = run.row(cell).workers
        return workers[0].pid if workers and workers[0].pid not in (0, old) else None

    stat = Path(f"/proc/{until(fresh, f'the replacement of {cell}')}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK") - killed_at


def all_serve(run):
    def there():
        routers, engines = run.ready("router-policy"), run.ready("engine-policy-0")
        if routers and engines:
            (router,) = routers.values()
            urls = {url for _, url in engines.values()}
            return (router, engines) if healthy(router[1]) == urls else None
        return None

    return until(there, "all engines to serve", 0.1)


def lose_an_engine(run, number):
    """Seconds until it is out of the router, until its replacement's process starts, and until that one serves."""
    (_, router), engines = all_serve(run)
    cell, (row, url) = sorted(engines.items())[number % ENGINES]
    killed_at, begun = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
    os.kill(row.workers[0].pid, signal.SIGKILL)
    until(lambda: (seen := healthy(router)) is not None and url not in seen, f"{url} to leave the router")
    out_s = time.monotonic() - begun
    process_s = started_s(run, cell, row.workers[0].pid, killed_at)
    until(lambda: url in (healthy(router) or ()), f"{url} to be back")
    return out_s, process_s, time.monotonic() - begun


def lose_the_router(run):
    """Seconds until it is back, on its port, with all engines."""
    (row, router), engines = all_serve(run)
    urls = {url for _, url in engines.values()}
    begun = time.monotonic()
    os.kill(row.workers[0].pid, signal.SIGKILL)
    # Until the old one is gone, its list still answers.
    until(lambda: healthy(router) is None, "the router's death")
    until(lambda: healthy(router) == urls, "the router with all its engines")
    return time.monotonic() - begun


def measure(run_dir, rounds=5):
    run = Run(run_dir / "run")
    try:
        out, started, again = zip(*(lose_an_engine(run, number) for number in range(rounds)), strict=True)
        back = [lose_the_router(run) for _ in range(rounds)]
    finally:
        run.close()
    found = {"engine_out": out, "engine_process": started, "engine_serves": again, "router_back": back}
    return {f"{name}_s": statistics.median(values) for name, values in found.items()} | {
        f"{name}_worst_s": max(values) for name, values in found.items()
    }
