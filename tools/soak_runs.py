"""See tools/soak."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.wire.operator import OperatorClient
from miles_hpc.wire.sockets import HubError
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
STEPS = 200
SETS = (
    f"steps={STEPS}",
    "data.heldout=",
    "train.save_every=3",
    # Every role is hurt again and again on purpose; that it happens too often is not what is asked here.
    "heal.budget=1000",
    "heal.quarantine=0",
    "heal.backoff_s=0.1",
)
PACE = "inference.fake_token_ms=40"
NODES = 3
GETS_ON_S = 150.0
"""Until a run has made two more steps after a fault; a driver that goes back has to make the lost ones again first."""


@dataclass
class Outcome:
    """What became of one run's faults."""

    ok: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""


def commits(run):
    """Commits so far, of every driver."""
    return len(list((run.run_dir / "commits").glob("*.json")))


def hurt(run, role, fault):
    """One fault, for as long as it lasts."""
    if fault == "cut":
        node = run.hubs()[0] if role == "hub" else run.node_of(role.rpartition("-")[0])
        run.net.cut(node)
        time.sleep(LASTS_S)  # how long the fault lasts
        run.net.join(node)
        return
    pid = run.hub_pid() if role == "hub" else run.pid(role)
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "stop":
        time.sleep(LASTS_S)  # how long the fault lasts
        with contextlib.suppress(ProcessLookupError):  # it was replaced while it stood still
            os.kill(pid, signal.SIGCONT)


def gets_on(run, steps):
    """Wait until the run has appended so many lines of metrics, whichever steps they are."""
    goal = len(run.metrics()) + steps

    def there():
        assert run.alive(), "the run has ended"
        return len(run.metrics()) >= goal

    wait_for(there, f"{steps} more steps", GETS_ON_S)


def drain(run):
    """Ask for the end; a hub that has just been replaced is asked again."""

    def asked():
        if not run.alive():
            return True
        try:
            with OperatorClient(run.run_dir, timeout_s=5.0) as operator:
                operator.drain("the soak has hurt it enough", 60.0)
        except (HubError, OSError):
            return None
        return True

    wait_for(asked, "a hub that takes the order to drain", 60)
    wait_for(lambda: not run.alive(), "the end of the run", 200)


def make_run(directory, spread, *sets):
    return SpreadRun(directory, NODES, *sets) if spread else SmokeRun(directory, *sets)


def quiet_ledger(directory):
    """The ledger of a run that nobody hurts, at full speed."""
    run = SmokeRun(directory, *SETS, "inference.fake_token_ms=0")
    try:
        assert run.end(1200)["outcome"] == "finished", run.tail()
        return run.ledger()
    finally:
        run.close()


def one_run(directory, faults, draw, spread):
    """Hurt one run by all of `faults`, in turn; returns its outcome and its ledger."""
    outcome = Outcome()
    run = make_run(directory, spread, *SETS, PACE)
    doing = ("start", "")
    try:
        gets_on(run, 2)
        for doing in faults:
            time.sleep(draw.uniform(0, 1.0))  # the moment, not a wait: anywhere inside a step
            hurt(run, *doing)
            gets_on(run, 2)
            outcome.ok.append(doing)
        doing = ("end", "")
        drain(run)
        summary = json.loads((run.run_dir / "summary.json").read_text())
        groups = summary["groups"]
        assert summary["outcome"] == "drained", f"it ended as {summary['outcome']}: {summary.get('reason')}"
        total = groups["committed"] + groups["returned"] + sum(groups["dropped"].values())
        assert groups["dispatched"] == total, f"the groups do not add up: {groups}"
        wait_for(lambda: run.left() == [], f"no process to be left: {run.left()}", 10)
        steps = summary["steps"]
        outcome.text = f"{steps} steps, {commits(run)} commits, healed {summary['cells']['healed']}, {groups}"
        return outcome, run.ledger()
    except Exception as error:  # whatever a run that is hurt makes of the tools that look at it
        outcome.failed.append(doing)
        outcome.text = f"{' '.join(doing)}: {type(error).__name__}: {str(error)[:600]}"
        return outcome, None
    finally:
        run.close()


def table_of(outcomes, faults):
    """Counts of good faults for each role and fault, and what failed."""
    rows = []
    for role in ROLES:
        cells = [
            f"{sum(o.ok.count((role, fault)) for o in outcomes)} ok"
            + (f", {n} FAILED" if (n := sum(o.failed.count((role, fault)) for o in outcomes)) else "")
            for fault in faults
        ]
        rows.append(f"{role:32}" + "".join(f"{cell:16}" for cell in cells))
    return "\n".join([f"{'':32}" + "".join(f"{fault:16}" for fault in faults), *rows])


def main():
    parser = argparse.ArgumentParser(prog="tools/soak")
    parser.add_argument("--seeds", type=int, default=20, help="rounds through the whole table (default: 20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the first round")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further run after this long")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default: 2)")
    parser.add_argument("--faults", type=int, default=9, help="faults in one run (default: 9)")
    parser.add_argument("--keep", type=Path, help="directory of the runs; those that failed stay there")
    options = parser.parse_args()
    spread = os.geteuid() == 0
    faults = FAULTS if spread else FAULTS[:2]
    began, outcomes, lock = time.monotonic(), [], threading.Lock()
    place = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    place.mkdir(parents=True, exist_ok=True)
    print(f"seeds {options.seed} to {options.seed + options.seeds - 1}, runs in {place}", flush=True)
    quiet = quiet_ledger(place / "quiet")
    shutil.rmtree(place / "quiet")
    print(f"the undisturbed run: {len(quiet)} groups, {time.monotonic() - began:.0f} s", flush=True)

    def work(seed, number, chosen):
        if time.monotonic() - began > 60 * options.minutes:
            return
        directory = place / f"s{seed}-{number}"
        started = time.monotonic()
        outcome, ledger = one_run(directory, chosen, random.Random(f"{seed}/{number}"), spread)
        if ledger is not None and ledger != quiet[: len(ledger)]:
            # Any of its faults may be to blame.
            outcome.failed, outcome.ok = outcome.ok, []
            outcome.text = f"the ledger differs from that of the undisturbed run; {outcome.text}"
        if not outcome.failed:
            shutil.rmtree(directory)
        with lock:
            outcomes.append(outcome)
            word = "FAILED" if outcome.failed else "ok"
            what = ", ".join(f"{fault} {role}" for role, fault in chosen)
            print(f"seed {seed} run {number}: {word} in {time.monotonic() - started:.0f} s: {outcome.text}", flush=True)
            print(f"    {what}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = []
        for seed in range(options.seed, options.seed + options.seeds):
            table = list(itertools.product(ROLES, faults))
            random.Random(seed).shuffle(table)
            for number, start in enumerate(range(0, len(table), options.faults)):
                tasks.append(pool.submit(work, seed, number, table[start : start + options.faults]))
        for task in tasks:
            task.result()
    failed = [outcome for outcome in outcomes if outcome.failed]
    hurts = sum(len(outcome.ok) for outcome in outcomes)
    print(table_of(outcomes, faults))
    print(f"{len(outcomes)} runs, {hurts} faults survived, {len(failed)} runs failed")
    print(json.dumps({"runs": len(outcomes), "survived": hurts, "failed": [o.text for o in failed]}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
