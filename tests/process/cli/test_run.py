"""`miles-hpc run` with the real hub and agents; every other program is a stub, so that only the command is tested."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from .conftest import COMMAND, STUB, marked, running, stubbed, until

pytestmark = pytest.mark.process

CELLS = {
    "controller-00000",
    "driver-00000",
    "engine-policy-0-00000",
    "engine-policy-0-00001",
    "executor-00000",
    "rollout-worker-00000",
    "rollout-worker-00001",
    "router-policy-00000",
    "session-server-00000",
    "session-server-00001",
    "trainer-00000",
}


def summary(place) -> dict:
    return json.loads((place.run_dir / "summary.json").read_text())


def test_a_run_that_finishes_says_a_line_a_step_and_where_everything_is(place):
    done = stubbed(place, "finish")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    assert any(line.startswith("note: inference.engine = fake") for line in lines)
    topology = "\n".join(lines[lines.index("2 nodes:") + 1 :][:2])
    assert {word.strip(",") for word in topology.split() if word.strip(",") in CELLS} == CELLS
    assert "trainer-00000 (2 ranks)" in topology and "127.0.0.2" in topology and "127.0.0.3" in topology
    for name in ("logs", "metrics", "summary", "report", "picture"):
        path = next(line.split(maxsplit=1)[1] for line in lines if line.startswith(name + " "))
        assert Path(path).exists()
    found = summary(place)
    assert (found["outcome"], found["exit_code"], found["steps"], found["weight_version"]) == ("finished", 0, 2, 3)
    assert found["cells"] == {"started": 11, "healed": 0}
    env = json.loads((place.run_dir / "env.json").read_text())
    assert env["command"][1:] == ["run", "my.toml", "--run-dir", str(place.run_dir)]
    assert marked(place.run_dir) == []


def test_status_and_cells_answer_while_it_runs(place):
    with running(place):
        first = place.call("status", "--json")
        status = json.loads(first.stdout)
        assert list(status) == [
            *("run_id", "attempt", "epoch", "state", "reason", "outcome", "draining", "hub", "step", "weight_version"),
            *("nodes", "cells", "source", "age_s", "dropped"),
        ]
        assert (status["run_id"], status["attempt"], status["epoch"]) == ("run", 0, 1)
        assert (status["step"], status["weight_version"], status["age_s"]) == (2, 3, 0.0)
        assert [node["state"] for node in status["nodes"]] == ["alive", "alive"]
        for name in ("run", str(place.run_dir)):
            rows = json.loads(place.call("cells", name, "--json").stdout)
            assert {row["cell"] for row in rows} == CELLS
            assert all(
                list(row) == ["cell", "pool", "node", "generation", "state", "workers", "restarts"] for row in rows
            )
            trainer = next(row for row in rows if row["cell"] == "trainer-00000")
            assert trainer["generation"][0] == 1 and len(trainer["workers"]) == 2 and trainer["state"] == "ready"
            assert all(psutil.pid_exists(worker["pid"]) and worker["ports"]["rpc"] for worker in trainer["workers"])
        assert "node-00001  127.0.0.3" in place.call("status").stdout
        assert "restarts 0" in place.call("cells").stdout
        second = stubbed(place, "finish", "--resume")
        assert second.returncode == 2 and "is in use: attempt 0 runs on host" in second.stderr
    after = place.call("status", "run", "--json")
    assert json.loads(after.stdout)["step"] == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_within_ten_seconds_as_cancelled(place, signum):
    with running(place) as process:
        started = time.monotonic()
        process.send_signal(signum)
        out, _ = process.communicate(timeout=20)
        assert time.monotonic() - started < 10
        assert process.returncode == 130
        assert marked(place.run_dir) == []
    assert summary(place)["outcome"] == "cancelled" and summary(place)["exit_code"] == 130
    last = out.splitlines()[-1]
    assert last.startswith(f"miles-hpc: cancelled: cancelled by {signum.name}; log ")
    assert last.endswith(f"next: miles-hpc run my.toml --run-dir {place.run_dir} --resume")


def test_a_second_interrupt_does_not_wait_for_a_stubborn_program(place):
    stubborn = place.write("stubborn.py", STUB.read_text().replace("lambda *_: os._exit(0)", "signal.SIG_IGN"))
    python = place.write("stub-python", (place.path / "stub-python").read_text().replace(str(STUB), str(stubborn)))
    python.chmod(0o755)
    with running(place) as process:
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        until(lambda: time.monotonic() - started > 0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert time.monotonic() - started < 8
        assert process.returncode == 130 and marked(place.run_dir) == []


def test_an_exception_in_the_driver_is_the_last_line_with_log_and_next_command(place):
    done = stubbed(place, "raise", "--set", "name=my run", "--set", "heal.budget=0")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1, done.stdout
    assert (
        last.startswith("miles-hpc: failed: ")
        and "driver-00000-00000 ended" in last
        and "ValueError: the script says so" in last
    )
    log = last.split("; log ")[1].split("; next: ")[0]
    assert "the script says so" in Path(log).read_text()
    assert last.endswith(
        f"next: miles-hpc run my.toml --set 'name=my run' --set heal.budget=0 --run-dir {place.run_dir} --resume"
    )
    assert summary(place)["outcome"] == "failed" and (place.run_dir / "report.html").exists()
    assert marked(place.run_dir) == []


def test_a_killed_hub_is_replaced_in_place_and_the_command_goes_on_with_the_next(place):
    def cells():
        rows = json.loads(place.call("cells", "--json").stdout or "[]")
        return {row["cell"]: [worker["pid"] for worker in row["workers"]] for row in rows if row["state"] == "ready"}

    with running(place) as process:
        status = place.run_dir / "status.json"
        until(lambda: json.loads(status.read_text())["step"] == 2)
        before = cells()
        hub = json.loads(status.read_text())["hub"]
        os.kill(int(hub.rpartition(" ")[2]), signal.SIGKILL)
        until(lambda: json.loads(status.read_text())["epoch"] == 2, 60)
        until(lambda: cells().keys() == before.keys(), 60)
        after = cells()
        assert {name: pids for name, pids in after.items() if name.startswith(("engine", "router"))} == {
            name: pids for name, pids in before.items() if name.startswith(("engine", "router"))
        }
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130, out
        assert marked(place.run_dir) == []
    found = summary(place)
    assert (found["outcome"], found["exit_code"], found["attempt"]) == ("cancelled", 130, 0)
    assert json.loads((place.run_dir / "verdicts" / "attempt-0.json").read_text()) == found


def test_a_run_is_resumed_without_naming_its_files_again(place):
    assert stubbed(place, "raise").returncode == 1
    done = subprocess.run(
        [*COMMAND, "run", "--run-dir", str(place.run_dir), "--resume", "--set", "steps=3"],
        cwd=place.path,
        env={**place.env, "STUB_DRIVER": "finish"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary(place)["attempt"], summary(place)["steps"]) == (1, 3)
    assert (place.run_dir / "logs" / "latest").readlink() == Path("attempt-1")


def test_a_model_is_made_into_the_run_directory(place):
    done = stubbed(place, "finish", "--set", 'model.path=""', "--set", "model.make.hidden_size=16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place.run_dir / "model" / "tokenizer.json").exists()
    assert f'path = "{place.run_dir}/model"' in (place.run_dir / "config.resolved.toml").read_text()
    again = subprocess.run(
        [*COMMAND, "run", "--run-dir", str(place.run_dir), "--resume"],
        cwd=place.path,
        env={**place.env, "STUB_DRIVER": "finish"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr


def test_on_a_terminal_the_steps_are_a_table_and_the_cursor_comes_back(place):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", "my.toml", "--run-dir", str(place.run_dir)],
        cwd=place.path,
        env={**place.env, "STUB_DRIVER": "finish", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    shown = b""
    # The terminal ends (EIO) when the last process that holds it does.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert process.wait(timeout=30) == 0
    text = shown.decode()
    assert "tokens/s" in text and "2/2" in text and "finished after 2 steps" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_agent_and_hub_are_verbs_too(place):
    for verb in ("agent", "hub"):
        done = place.call(verb, "--help")
        assert done.returncode == 0 and f"usage: miles-hpc {verb}" in done.stdout
