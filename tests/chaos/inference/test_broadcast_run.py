"""Whole runs whose trainer broadcasts its weights over gloo into embedded engines; who dies is met in mid-broadcast."""

import os
import signal
import time
from pathlib import Path

import pytest

from miles_hpc.wire.operator import OperatorClient

from ..conftest import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

SETTINGS = (
    *("train.trainer=torch", "train.weight_transfer=distributed", "train.ranks=1", "train.save_every=2"),
    *("inference.engine=embedded", "inference.stall_s=18"),
    # So many tensors do not fit into the buffers of a connection: a stopped engine keeps the trainer in the broadcast.
    *("model.make.hidden_size=256", "model.make.layers=4"),
    *("rollout.batch_size=4", "rollout.samples_per_prompt=2", "rollout.workers=1", "rollout.session_every=0"),
    *("session.servers=0", "data.heldout="),
)
ENGINE, TRAINER, CONTROLLER = "engine-policy-0-00001-00000", "trainer-00000-00000", "controller-00000-00000"
START_S = 500.0
"""Until engines and trainers have loaded torch on a busy machine."""
_UNREAD = 16384
"""Bytes on a connection of the update group that an engine has not read: tensors; what makes the group is smaller."""


def freeze_in_a_broadcast(run, engine=ENGINE, trainer=TRAINER):
    """SIGSTOP an engine with tensors of the trainer unread in its sockets: nothing can end the broadcast then."""
    pid, sender = run.pid(engine), run.pid(trainer)
    http = run.cell(engine.rpartition("-")[0]).workers[0].ports["http"]

    def caught():
        assert run.alive(), run.tail()
        if not unread_of_group(pid, sender, http):
            return None
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            if max(unread_of_group(pid, sender, http), default=0) >= _UNREAD:
                return pid
            time.sleep(0.005)
        os.kill(pid, signal.SIGCONT)
        return None

    return wait_for(caught, f"{engine} in a broadcast", START_S, pause_s=0.002)


def unread_of_group(pid, sender, http):
    """Unread bytes of each connection between two processes, except those to the port of HTTP."""
    own, other = inodes_of(pid), inodes_of(sender)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = {row[1] for row in rows if row[9] in other}
    return [
        int(row[4].partition(":")[2], 16)
        for row in rows
        if row[3] == "01" and row[9] in own and row[2] in ends and not row[1].endswith(f":{http:04X}")
    ]


def inodes_of(pid):
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(descriptor.readlink()).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    return found


def last_word_on_windows(run):
    logs = (run.run_dir / "logs" / "attempt-0").rglob("controller-00000-00000.g*.log")
    log = max(logs, key=lambda path: path.stat().st_mtime)
    return [line for line in log.read_text().splitlines() if " window " in line][-1]


def test_an_engine_then_controller_and_hub_die_inside_a_broadcast_and_the_run_goes_on(smoke):
    run = smoke(*SETTINGS, "steps=100000")
    run.reach(1, START_S)

    victim = freeze_in_a_broadcast(run)
    assert "begins with 2 engines" in last_word_on_windows(run)
    os.kill(victim, signal.SIGKILL)
    run.reach(run.step() + 2, START_S)

    controller, hub = run.pid(CONTROLLER), run.hub_pid()
    receiver = freeze_in_a_broadcast(run)
    assert receiver != victim and "begins with 2 engines" in last_word_on_windows(run)
    os.kill(controller, signal.SIGKILL)
    os.kill(hub, signal.SIGKILL)
    run.hub_of_epoch(2)
    # The broadcast goes on now, beside a controller that knows nothing of it.
    os.kill(receiver, signal.SIGCONT)
    run.reach(run.step() + 2, START_S)

    with OperatorClient(run.run_dir) as operator:
        operator.drain("enough")
    summary = run.end()
    assert summary["outcome"] == "drained" and summary["cells"]["healed"] >= 2, run.tail()
    groups = summary["groups"]
    assert groups["committed"] == 4 * summary["steps"]
    assert groups["dispatched"] == groups["committed"] + groups["returned"] + sum(groups["dropped"].values())
    versions = [row["weight_version"] for row in run.metrics()]
    assert versions == sorted(set(versions))
    ledger = sorted(run.ledger_lines(), key=lambda line: line["step"])
    told = [version for line in ledger for version in line["weight_versions"]]
    assert told == sorted(told) and told[0] >= 1, told
    assert run.left() == []
