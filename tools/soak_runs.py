"""See tools/soak."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.conftest import SmokeRun, wait_for
from tests.chaos.hub.namespaces import SpreadRun

ROLES = (
    "rollout-worker-00000-00000",
    "executor-00000-00000",
    "trainer-00000-00001",
    "driver-00000-00000",
    "controller-00000-00000",
    "router-policy-00000-00000",
    "engine-policy-0-00001-00000",
    "session-server-00001-00000",
    "hub",
)
FAULTS = ("kill", "stop", "cut")
LASTS_S = 15.0
STEPS = 60
SETS = (f"steps={STEPS}", "inference.fake_token_ms=20", "train.save_every=5", "heal.budget=20", "heal.backoff_s=0.1")
NODES = 3


def pid_of(run, role):
    return run.hub_pid() if role == "hub" else run.pid(role)


def hurt(run, role, fault, log):
    """One fault; returns once the run is on its own again."""
    log(f"step {run.step()}: {fault} {role}")
    if fault == "cut":
        node = run.process_node(role)
        run.net.cut(node)
        time.sleep(LASTS_S)  # how long the fault lasts
        run.net.join(node)
        return
    pid = pid_of(run, role)
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "stop":
        time.sleep(LASTS_S)  # how long the fault lasts
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            log(f"  {role} was replaced while it stood still")


class Spread(SpreadRun):
    """A run on namespaces, whose links can be cut."""

    def process_node(self, role: str) -> int:
        return self.hubs()[0] if role == "hub" else self.node_of(role.rpartition("-")[0])

    def finish(self) -> dict:
        wait_for(lambda: not self.alive(), "the end of the run", 400)
        return dict(json.loads((self.run_dir / "summary.json").read_text()))


class Local(SmokeRun):
    """A run on this machine's addresses."""

    def finish(self) -> dict:
        return self.end(400)


def one_run(directory, faults, draw, log):
    cuts = any(fault == "cut" for _, fault in faults)
    run = Spread(directory, NODES, *SETS) if cuts else Local(directory, *SETS)
    try:
        step = 0
        for role, fault in faults:
            step = min(STEPS - 10, max(step, run.step()) + draw.randint(2, 6))
            run.reach(step, 200)
            time.sleep(draw.uniform(0, 0.5))  # anywhere inside a step
            hurt(run, role, fault, log)
        summary = run.finish()
        groups = summary["groups"]
        assert summary["outcome"] == "finished", run.tail()[-3000:]
        total = groups["committed"] + groups["returned"] + sum(groups["dropped"].values())
        assert groups["dispatched"] == total, groups
        assert run.left() == [], run.left()
        return run.ledger(), groups
    finally:
        run.close()


def main():
    parser = argparse.ArgumentParser(prog="tools/soak")
    parser.add_argument("--seeds", type=int, default=20, help="rounds through the whole table (default: 20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the first round")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further run after this long")
    options = parser.parse_args()
    root = os.geteuid() == 0
    began, failures, runs = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        quiet, _ = one_run(Path(place) / "quiet", [], random.Random(0), print)
        for seed in range(options.seed, options.seed + options.seeds):
            draw = random.Random(seed)
            table = list(itertools.product(ROLES, FAULTS if root else FAULTS[:2]))
            draw.shuffle(table)
            for number in range(0, len(table), 3):
                if time.monotonic() - began > 60 * options.minutes:
                    break
                faults, lines = table[number : number + 3], []
                runs += 1
                try:
                    ledger, groups = one_run(Path(place) / f"s{seed}-{number}", faults, draw, lines.append)
                    assert ledger == quiet, "the ledger differs from that of the undisturbed run"
                    print(f"seed {seed} run {number // 3}: ok, {groups}; {'; '.join(lines)}", flush=True)
                except AssertionError as error:
                    failures.append((seed, number // 3))
                    print(f"seed {seed} run {number // 3}: FAILED: {error}\n  {'; '.join(lines)}", flush=True)
    print(f"{runs} runs, {len(failures)} failed: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
