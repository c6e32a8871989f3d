"""Real workers under a real agent and warden, ordered over the real wire."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.agent import procfs
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Goodbye, Heartbeat, PortInfo, Probe, Shutdown, StartWorker, WorkerExited

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

IDLE = "import signal; signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
STUBBORN = DEAF + "while True: signal.pause()"
WORKER = "pool-00000-00000"


def test_a_worker_is_started_and_stopped_by_order(hub, node, nodes):
    started = hub.start(WORKER, "print('hello there', flush=True)\n" + IDLE)
    hub.ready(WORKER)
    hub.until(lambda: _log(hub, WORKER) == "hello there\n", "line")
    assert procfs.read_process(started.pid) is not None
    hub.stop(WORKER)
    ended = hub.exited(WORKER)
    assert (ended.cause, ended.signal, ended.oom) == ("stopped", signal.SIGTERM, "no")
    assert ended.log_tail == "hello there\n"
    assert Path(ended.log_path) == nodes.run_dir / "logs/attempt-0/node-00000" / f"{WORKER}.g1-1.log"
    assert nodes.marked(WORKER) == []


def test_a_worker_gets_a_clean_process(hub, node, nodes):
    program = """
import json, os, signal
print(json.dumps({
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "stdin": os.readlink("/proc/self/fd/0"),
    "sid": os.getsid(0) == os.getpid(), "pgid": os.getpgid(0) == os.getpid(),
    "usr": [signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGUSR1, signal.SIGUSR2)],
    "others": [signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGHUP)],
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "env": {k: v for k, v in os.environ.items() if k in ("MILES_HPC_MARK", "SPT_NOENV", "TMPDIR", "PYTHONUNBUFFERED")},
    "scratch": os.path.isdir(os.environ["TMPDIR"]),
}))
"""
    hub.start(WORKER, program)
    found = json.loads(hub.exited(WORKER).log_tail)
    scratch = Path(found["env"].pop("TMPDIR"))
    assert found == {
        "fds": [0, 1, 2],
        "stdin": "/dev/null",
        "sid": True,
        "pgid": True,
        "usr": [True, True],
        "others": [True, True],
        "blocked": 0,
        "env": {
            "MILES_HPC_MARK": f"{nodes.run_id}/0/node-00000/{node.incarnation}/{WORKER}/g1-1",
            "SPT_NOENV": "1",
            "PYTHONUNBUFFERED": "1",
        },
        "scratch": True,
    }
    assert not scratch.exists()


def test_the_exit_code_and_the_log_of_a_crash_are_pushed_at_once(hub, node):
    hub.start(WORKER, "import sys; sys.stderr.write('x' * 100_000 + '\\nthe end'); sys.exit(7)")
    started = time.monotonic()
    ended = hub.exited(WORKER)
    assert (ended.cause, ended.exit_code, ended.signal) == ("exited", 7, None)
    assert len(ended.log_tail) == 64 * 1024 and ended.log_tail.endswith("the end")
    assert time.monotonic() - started < 5.0


def test_a_killed_worker_is_reported_at_once(hub, node):
    started = hub.start(WORKER, IDLE)
    hub.ready(WORKER)
    assert hub.until(lambda: b"signal.pause" in Path(f"/proc/{started.pid}/cmdline").read_bytes(), "exec")
    at = time.monotonic()
    os.kill(started.pid, signal.SIGKILL)
    ended = hub.exited(WORKER)
    assert ended.signal == 9 and ended.oom in ("probable", "no")
    assert time.monotonic() - at < 3.0


def test_a_worker_that_ignores_term_is_killed_after_its_grace(hub, node):
    started = hub.start(WORKER, DEAF + "print('up', flush=True)\n" + STUBBORN, stop_grace=0.7)
    hub.until(lambda: _log(hub, WORKER) == "up\n", "line")
    at = time.monotonic()
    hub.stop(WORKER)
    ended = hub.exited(WORKER)
    assert 0.6 < time.monotonic() - at < 10.0
    assert (ended.signal, ended.cause, ended.oom) == (9, "stopped", "no")
    assert procfs.read_process(started.pid) is None


def _log(hub, worker: str, n: int = 1) -> str:
    path = hub.run_dir / "logs/attempt-0/node-00000" / f"{worker}.g1-{n}.log"
    return path.read_text() if path.exists() else ""


GRANDCHILDREN = {
    "same group, ignores TERM": f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])",
    "own session": f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)",
    "daemon by double fork": f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        exec({STUBBORN!r})
    os._exit(0)
os.wait()
""",
    "spawned by multiprocessing": """
import multiprocessing
multiprocessing.get_context('spawn').Process(target=signal.pause).start()
""",
    "a title over its environment": """
import ctypes, multiprocessing
def rename():
    # As setproctitle: the title goes over the arguments, and over the environment too unless SPT_NOENV is set.
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end, env_end = int(fields[45]), int(fields[46]), int(fields[48])
    title = b"sglang::scheduler".ljust((end if os.environ.get("SPT_NOENV") else env_end) - start, b"\\0")
    ctypes.memmove(start, title, len(title))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    while True: signal.pause()
child = multiprocessing.get_context('fork').Process(target=rename, daemon=False)
child.start()
""",
    "no environment, own session": f"""
subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True, env={{}})
""",
}


@pytest.mark.parametrize("how", ["order", "kill -9", "its own exit"])
@pytest.mark.parametrize("kind", GRANDCHILDREN)
def test_nothing_that_a_worker_started_outlives_it(hub, node, nodes, kind, how):
    program = "import os, signal, subprocess, sys\n" + GRANDCHILDREN[kind]
    program += "\nprint('started', flush=True)\nsys.stdin.read()\nsignal.sigwait([signal.SIGTERM, signal.SIGINT])"
    if how == "its own exit":
        program = program.replace("signal.sigwait([signal.SIGTERM, signal.SIGINT])", "os._exit(3)")
    agent = node.pid
    before = {process.pid for process in procfs.descendants(procfs.snapshot(), agent)}
    started = hub.start(WORKER, program, stop_grace=0.5)
    if how != "its own exit":
        hub.until(lambda: "started" in _log(hub, WORKER), "grandchild")
        assert len({p.pid for p in procfs.descendants(procfs.snapshot(), agent)} - before) >= 2
        if how == "kill -9":
            os.kill(started.pid, signal.SIGKILL)
        else:
            hub.stop(WORKER)
    ended = hub.exited(WORKER)
    assert ended.generation == Generation(1, 1)
    assert {p.pid for p in procfs.descendants(procfs.snapshot(), agent)} - before == set()
    assert nodes.marked(WORKER) == []


def test_a_stranger_with_the_same_arguments_survives(hub, node):
    decoy = subprocess.Popen([sys.executable, "-c", STUBBORN])
    try:
        hub.start(WORKER, STUBBORN, stop_grace=0.3)
        hub.stop(WORKER)
        hub.exited(WORKER)
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait()


def test_a_new_generation_waits_until_the_old_one_is_gone(hub, node):
    hub.start(WORKER, "print('up', flush=True)\n" + STUBBORN, stop_grace=1.0)
    hub.until(lambda: _log(hub, WORKER) == "up\n", "line")
    hub.stop(WORKER)
    refused = hub.reserve(WORKER, [], n=2)
    assert "g1-1" in refused.error or "generation 1-1" in refused.error
    hub.exited(WORKER)
    assert hub.reserve(WORKER, [], n=3).error == ""
    hub.start(WORKER, IDLE, n=3)


def test_orders_may_arrive_twice(hub, node):
    first = hub.reserve(WORKER, [PortInfo(name="http")])
    hub.heard.clear()
    assert hub.reserve(WORKER, [PortInfo(name="http")]).ports == first.ports
    started = hub.start(WORKER, IDLE, ports=first.ports)
    hub.heard.clear()
    assert hub.start(WORKER, IDLE, ports=first.ports).pid == started.pid
    hub.stop(WORKER)
    hub.stop(WORKER)
    hub.exited(WORKER)


def test_a_stop_of_what_does_not_run_is_confirmed(hub, node):
    hub.stop("pool-00007-00000", n=4)
    ended = hub.exited("pool-00007-00000", n=4)
    assert ended.cause == "stopped" and "not running" in ended.text


def test_a_program_that_does_not_exist_is_reported_by_name(hub, node):
    hub.send(
        "node-00000",
        StartWorker(
            worker=WORKER, generation=Generation(1, 1), argv=["no-such-program"], env={}, ports={}, probe=Probe()
        ),
    )
    ended = hub.exited(WORKER)
    assert ended.cause == "spawn_failed" and "no-such-program" in ended.text


def test_a_probe_of_an_unknown_port_is_refused(hub, node):
    order = StartWorker(
        worker=WORKER,
        generation=Generation(1, 1),
        argv=[sys.executable],
        env={},
        ports={},
        probe=Probe(kind="tcp", port="http"),
    )
    hub.send("node-00000", order)
    ended = hub.exited(WORKER)
    assert ended.cause == "spawn_failed" and "'http'" in ended.text


def test_shutdown_stops_everything_and_passes_the_exit_code_on(hub, node, nodes):
    for index in range(3):
        hub.start(f"pool-{index:05d}-00000", IDLE)
    hub.send("node-00000", Shutdown(reason="finished", exit_code=75))
    hub.expect(Goodbye)
    assert nodes.wardens["node-00000"].wait(10) == 75
    assert len(hub.reports(WorkerExited)) == 3
    assert nodes.marked() == []


def test_heartbeats_come_at_the_interval_of_the_welcome(hub, node):
    hub.until(lambda: len(hub.reports(Heartbeat)) >= 5, "5 heartbeats", 3.0)
    numbers = [beat.seq for beat in hub.reports(Heartbeat)]
    assert numbers == list(range(1, len(numbers) + 1))
