"""What happens to a node when one of its own processes dies, and what nodes and runs do to each other: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from miles_hpc.agent import procfs
from miles_hpc.agent.exits import BROKEN
from miles_hpc.agent.warden import RESTARTS
from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Goodbye, Shutdown, WorkerExited
from tests.disks import FrozenDisk

from .conftest import WARDEN, FakeHub, Nodes, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
FAMILY = f"""
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True, env={{}})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        exec({STUBBORN!r})
    os._exit(0)
os.wait()
print("started", flush=True)
signal.pause()
"""
WORKER = "pool-00000-00000"


@pytest.fixture
def family(hub, node, nodes) -> list[procfs.Process]:
    """A worker with grandchildren of every kind; all processes below the warden but the agent."""
    hub.start(WORKER, FAMILY)
    log = nodes.run_dir / "logs/attempt-0/node-00000" / f"{WORKER}.g1-1.log"
    hub.until(lambda: log.exists() and "started" in log.read_text(), "family")
    table = procfs.snapshot()
    found = procfs.descendants(table, node.pid)
    assert len(found) == 5
    return found


def _gone(processes: list[procfs.Process]) -> bool:
    return all(procfs.start_time(process.pid) != process.start for process in processes)


def test_a_killed_agent_is_followed_by_a_new_incarnation_and_leaves_nothing(hub, node, nodes, family):
    del hub.hellos["node-00000"]
    os.kill(node.pid, signal.SIGKILL)
    second = hub.join()
    assert second.incarnation != node.incarnation and second.pid != node.pid and second.table == []
    assert _gone(family)
    assert "killed by signal 9" in (nodes.run_dir / "logs/attempt-0/node-00000/warden.log").read_text()
    hub.start(WORKER, STUBBORN, n=2)


@pytest.mark.parametrize(("code", "starts", "ends"), [(BROKEN, RESTARTS + 1, 1), (1, 1, 1), (75, 1, 75), (0, 1, 0)])
def test_only_an_agent_that_broke_or_was_killed_is_followed_by_another(tmp_path, code, starts, ends):
    argv = [sys.executable, "-I", "-S", str(WARDEN), "--run-id", "r", "--run-dir", str(tmp_path), "--attempt", "0"]
    argv += ["--node", "node-00000", "--", "sh", "-c", f"echo started >> {tmp_path}/agents; exit {code}"]
    assert subprocess.run(argv, timeout=20, check=False).returncode == ends
    assert (tmp_path / "agents").read_text().count("started") == starts


def test_a_node_whose_agents_keep_dying_gives_up(hub, node, nodes):
    for _ in range(RESTARTS):
        del hub.hellos["node-00000"]
        os.kill(node.pid, signal.SIGKILL)
        node = hub.join()
    os.kill(node.pid, signal.SIGKILL)
    assert nodes.wardens["node-00000"].wait(40) == 1
    assert "this node gives up" in (nodes.run_dir / "logs/attempt-0/node-00000/warden.log").read_text()
    assert nodes.marked() == []


def test_a_new_incarnation_waits_until_the_hub_no_longer_takes_the_old_one_for_alive(hub, node, nodes):
    hub.taken.add("node-00000")
    del hub.hellos["node-00000"]
    os.kill(node.pid, signal.SIGKILL)
    hub.until(lambda: len(hub.refused) >= 3, "three refused hellos")
    hub.taken.clear()
    assert hub.join().incarnation == hub.refused[0].incarnation != node.incarnation


def test_the_agent_sweeps_and_leaves_when_its_warden_is_killed(hub, node, nodes, family):
    nodes.wardens["node-00000"].kill()
    assert eventually(lambda: procfs.read_process(node.pid) is None)
    assert _gone(family)
    assert nodes.marked() == []
    assert "warden" in hub.expect(Goodbye).reason


def test_term_to_the_warden_stops_the_node_in_time(hub, node, nodes, family):
    started = time.monotonic()
    nodes.wardens["node-00000"].terminate()
    assert nodes.wardens["node-00000"].wait(40) == 1
    assert time.monotonic() - started < 8
    assert _gone(family)
    assert hub.expect(WorkerExited).cause == "stopped"


def test_quit_to_the_warden_ends_the_node_at_once(hub, node, nodes, family):
    nodes.wardens["node-00000"].terminate()
    hub.pump(0.2)
    started = time.monotonic()
    nodes.wardens["node-00000"].send_signal(signal.SIGQUIT)
    assert nodes.wardens["node-00000"].wait(40) == 1
    assert time.monotonic() - started < 5
    assert _gone(family)


IMPATIENT = """
import sys
from miles_hpc.agent import warden
argv = sys.argv[5:]
agent = "import sys; from miles_hpc.agent import run, supervise; supervise.HOPELESS_AFTER = 2; sys.exit(run.main())"
if "-m" in argv:
    argv[argv.index("-m"):argv.index("-m") + 2] = ["-c", agent]
warden.SWEEP_DEADLINE = 3
sys.exit(warden._main(argv))
"""
"""Stands in front of the warden's command, and shortens what it and its agent give to processes that do not end."""
WRITER = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
while True:
    os.pwrite(file, b'x', 0)
"""


@pytest.fixture
def frozen_disk(tmp_path):
    disk = FrozenDisk(tmp_path)
    yield disk
    disk.close()


def _freeze(disk: FrozenDisk, pid: int, file: Path) -> None:
    """Have a WRITER wait in the kernel, where no signal ends it."""

    def waits() -> bool:
        # `D` alone is anything that reads from a disk; a write to a disk that is frozen by now goes on no more.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        call = Path(f"/proc/{pid}/syscall").read_text().split()
        descriptor = int(call[1], 16) if len(call) > 3 else -1
        return state == "D" and os.path.realpath(f"/proc/{pid}/fd/{descriptor}") == str(file)

    assert eventually(file.exists)
    disk.freeze(60)
    assert eventually(waits)


@pytest.mark.parametrize("thawed", [False, True])
def test_a_node_that_is_sent_away_waits_for_a_worker_that_hangs_in_the_kernel_only_so_long(
    hub, nodes, frozen_disk, thawed
):
    warden = nodes.start(prefix=(sys.executable, "-c", IMPATIENT))
    hub.join()
    file = frozen_disk.path / "file"
    pid = hub.start(WORKER, WRITER, arguments=(str(file),)).pid
    _freeze(frozen_disk, pid, file)
    hub.send("node-00000", Shutdown(reason="finished"))
    log = nodes.run_dir / "logs/attempt-0/node-00000/agent.jsonl"
    hub.until(lambda: '"left_behind"' in log.read_text(), "word of what is left")
    (left,) = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "left_behind"]
    assert left["worker"] == WORKER and left["processes"][0].startswith(f"{pid} ")
    if thawed:
        frozen_disk.thaw()
    assert warden.wait(20) == (0 if thawed else 1)
    hub.pump()
    assert not hub.reports(Goodbye) and not hub.reports(WorkerExited)
    said = (log.parent / "warden.log").read_text()
    assert thawed or f"still not dead 3 s after SIGKILL: {pid} " in said
    frozen_disk.thaw()
    assert eventually(lambda: nodes.marked() == [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_an_agent_that_hangs_in_the_kernel_itself_is_named_and_given_up(tmp_path, frozen_disk, number):
    argv = [sys.executable, "-c", IMPATIENT, sys.executable, "-I", "-S", str(WARDEN), "--run-id", "r", "--run-dir"]
    argv += [str(tmp_path), "--attempt", "0", "--node", "node-00000", "--stop-grace", "0.5", "--"]
    file = frozen_disk.path / "file"
    argv += [sys.executable, "-c", WRITER, str(file)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        warden = subprocess.Popen(argv, stderr=output)
    children = Path(f"/proc/{warden.pid}/task/{warden.pid}/children")
    assert eventually(file.exists)
    (agent,) = map(int, children.read_text().split())
    _freeze(frozen_disk, agent, file)
    warden.send_signal(number)
    assert warden.wait(30) == 1
    assert f"still not dead 3 s after SIGKILL: {agent} {sys.executable} -c import os" in log.read_text()
    frozen_disk.thaw()
    assert eventually(lambda: procfs.start_time(agent) is None)


def test_direct_workers_die_when_warden_and_agent_are_killed_together(hub, node, nodes, family):
    nodes.wardens["node-00000"].kill()
    os.kill(node.pid, signal.SIGKILL)
    direct = [process for process in family if process.ppid == node.pid and process.session == process.pid]
    assert eventually(lambda: any(procfs.start_time(p.pid) != p.start for p in direct), 5)
    # The rest lives until the next agent of this node sweeps; what wiped its environment is beyond its reach.
    nodes.start()
    del hub.hellos["node-00000"]
    second = hub.join()
    assert second.incarnation != node.incarnation
    survivors = [p for p in family if procfs.start_time(p.pid) == p.start]
    wiped = [p for p in survivors if procfs.environ(p.pid) == {}]
    try:
        assert eventually(lambda: _gone([p for p in family if p not in wiped]), 5)
    finally:
        procfs.kill_all(wiped)


def test_a_second_incarnation_leaves_the_workers_of_living_agents_alone(hub, node, nodes):
    """Two nodes share one pid space: neither start nor death of one touches the other's workers."""
    nodes.start(1)
    other = hub.join("node-00001")
    here = hub.start(WORKER, STUBBORN)
    there = hub.start("pool-00001-00000", STUBBORN, node="node-00001")
    del hub.hellos["node-00001"]
    os.kill(other.pid, signal.SIGKILL)
    assert hub.join("node-00001").incarnation != other.incarnation
    assert procfs.read_process(there.pid) is None
    assert procfs.read_process(here.pid) is not None
    assert [p.pid for p in nodes.marked(WORKER)] == [here.pid]


def test_a_new_agent_kills_what_dead_incarnations_of_its_node_have_left(hub, nodes):
    def orphan(mark: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, procfs.MARK: mark, procfs.RUN_DIR: str(nodes.run_dir)}
        return subprocess.Popen([sys.executable, "-c", STUBBORN], env=env, start_new_session=True)

    mine = orphan(f"{nodes.run_id}/0/node-00000/0123456789ab/{WORKER}/g1-1")
    other_node = orphan(f"{nodes.run_id}/0/node-00001/0123456789ab/{WORKER}/g1-1")
    other_run = orphan(f"{nodes.run_id}x/0/node-00000/0123456789ab/{WORKER}/g1-1")
    assert eventually(lambda: all(procfs.mark_of(p.pid)[0] for p in (mine, other_node, other_run)))
    try:
        nodes.start()
        hub.join()
        assert mine.wait(5) == -signal.SIGKILL
        assert other_node.poll() is None and other_run.poll() is None
    finally:
        for process in (mine, other_node, other_run):
            process.kill()
            process.wait()


def test_two_runs_of_one_name_do_not_touch_each_other(hub, node, nodes, tmp_path):
    twin_dir = tmp_path / "elsewhere" / nodes.run_dir.name
    twin_dir.mkdir(parents=True)
    write_resolved(Config(), twin_dir)
    from miles_hpc.wire.security import create_secrets

    create_secrets(twin_dir, 0)
    twin_nodes, twin_hub = Nodes(twin_dir), FakeHub(twin_dir, nodes.run_id)
    try:
        twin_hub.publish()
        mine = hub.start(WORKER, STUBBORN)
        twin_nodes.start()
        twin = twin_hub.join()
        theirs = twin_hub.start(WORKER, STUBBORN)
        del twin_hub.hellos["node-00000"]
        os.kill(twin.pid, signal.SIGKILL)
        assert twin_hub.join().incarnation != twin.incarnation
        assert procfs.read_process(theirs.pid) is None
        assert procfs.read_process(mine.pid) is not None
    finally:
        twin_nodes.close()
        twin_hub.close()


def test_the_wardens_end_with_the_process_that_started_them(hub, nodes, run_dir):
    launcher = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import signal
from pathlib import Path
from conftest import Nodes
nodes = Nodes(Path({str(run_dir)!r}))
nodes.start()
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", launcher])
    hello = hub.join()
    hub.start(WORKER, STUBBORN)
    process.kill()
    process.wait()
    assert eventually(lambda: nodes.marked() == [])
    assert procfs.read_process(hello.pid) is None


def test_an_agent_without_a_hub_gives_up_by_name(nodes, run_dir):
    from miles_hpc.config.timing import Timing

    write_resolved(Config(timing=Timing(join=0.5)), run_dir)
    warden = nodes.start()
    assert warden.wait(40) == 1
    log = (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text()
    assert "no hub in" in log and "timing.join" in log


def test_a_wrong_key_is_named_within_three_seconds(nodes, run_dir):
    from miles_hpc.wire.security import create_secrets, secrets_dir

    hub = FakeHub(run_dir, nodes.run_id)
    try:
        hub.publish()
        (secrets_dir(run_dir, 0) / "agent.json").unlink()
        create_secrets(run_dir, 0)
        warden = nodes.start()
        assert eventually(lambda: warden.poll() is not None, 5)
        assert warden.poll() == 1
        lines = (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text().splitlines()
        at = {line["event"]: line["time"] for line in map(json.loads, lines)}
        assert at["leaving"] - at["hub_found"] < 3
        assert "does not know this process's key" in (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text()
    finally:
        hub.close()


def test_stateful_workers_are_killed_at_the_fence_and_the_others_are_kept(nodes, run_dir):
    from miles_hpc.config.timing import Timing

    fast = Timing(heartbeat=0.1, suspect=0.4, dead=0.5, failover_max=0.6, hub_stall=0.7, fence=5.8, hub_grace=60.0)
    write_resolved(Config(timing=fast), run_dir)
    hub = FakeHub(run_dir, nodes.run_id)
    try:
        hub.publish()
        nodes.start()
        hub.join()
        trainer = hub.start("trainer-00000-00000", STUBBORN, stateful=True, stop_grace=30.0)
        engine = hub.start("engine-00000-00000", STUBBORN)
        silent_since = time.monotonic()
        assert eventually(lambda: procfs.read_process(trainer.pid) is None, 20)
        assert 5.5 < time.monotonic() - silent_since < 10
        assert procfs.read_process(engine.pid) is not None
        ended = hub.exited("trainer-00000-00000")
        assert (ended.signal, ended.cause) == (9, "exited") and "timing.fence" in ended.text
        assert hub.start("engine-00001-00000", STUBBORN).pid
    finally:
        hub.close()


def test_a_hub_of_a_higher_epoch_is_followed_and_one_of_a_lower_is_not(hub, node, nodes):
    worker = hub.start(WORKER, STUBBORN)
    second, third = FakeHub(nodes.run_dir, nodes.run_id, epoch=3), FakeHub(nodes.run_dir, nodes.run_id, epoch=2)
    try:
        second.publish()
        hub.close()
        again = second.join()
        assert again.incarnation == node.incarnation
        assert [(row.worker, row.pid) for row in again.table] == [(WORKER, worker.pid)]
        rendezvous_file = nodes.run_dir / "rendezvous/0/epoch-00002.json"
        rendezvous_file.write_bytes(msgspec.json.encode(third.rendezvous))
        second.heard.clear()
        second.until(lambda: len(second.beats()) >= 10, "heartbeats")
        third.pump()
        assert third.heard == []
    finally:
        second.send("node-00000", Shutdown(reason="the test is over"))
        second.pump(0.2)
        second.close()
        third.close()


def test_a_hub_that_has_read_another_configuration_is_refused(nodes, run_dir):
    hub = FakeHub(run_dir, nodes.run_id)
    hub.rendezvous = msgspec.structs.replace(hub.rendezvous, digest="0" * 64)
    try:
        hub.publish()
        assert nodes.start().wait(40) == 1
        assert "another configuration" in (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text()
        assert hub.heard == []
    finally:
        hub.close()


def test_a_hub_of_another_version_is_refused_by_name(nodes, run_dir):
    hub = FakeHub(run_dir, nodes.run_id)
    hub.rendezvous = msgspec.structs.replace(hub.rendezvous, version="9.9")
    try:
        hub.publish()
        assert nodes.start().wait(40) == 1
        assert "is miles-hpc 9.9, this agent" in (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text()
    finally:
        hub.close()


def test_a_hub_file_of_another_run_is_refused_by_name(nodes, run_dir):
    hub = FakeHub(run_dir, "another-run")
    try:
        hub.publish()
        assert nodes.start().wait(40) == 1
        assert "another-run" in (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text()
    finally:
        hub.close()


def test_a_silent_hub_ends_the_node_after_its_grace(nodes, run_dir):
    from miles_hpc.config.timing import Timing

    fast = Timing(
        heartbeat=0.1, suspect=0.4, dead=0.5, failover_max=0.6, hub_stall=0.7, fence=5.8, hub_grace=6.0, join=5.0
    )
    write_resolved(Config(timing=fast), run_dir)
    hub = FakeHub(run_dir, nodes.run_id)
    warden = nodes.start()
    try:
        hub.publish()
        hub.join()
        hub.start(WORKER, STUBBORN)
        silent_since = time.monotonic()
        assert warden.wait(40) == 1
        assert 5.5 < time.monotonic() - silent_since < 12
        assert nodes.marked() == []
        assert "timing.hub_grace" in (run_dir / "logs/attempt-0/node-00000/agent.jsonl").read_text()
    finally:
        hub.close()


def test_warden_and_agent_are_small_and_start_fast(nodes, run_dir):
    hub = FakeHub(run_dir, nodes.run_id)
    try:
        hub.publish()
        warden = nodes.start()
        hello = hub.join()
        # CPU time: on a machine with other work the clock says little.
        seconds = sum(_cpu_s(pid) for pid in (warden.pid, hello.pid))
        pss = sum(_pss_kib(pid) for pid in (warden.pid, hello.pid))
        assert pss < 60 * 1024, f"{pss} KiB"
        assert seconds < 0.8, f"{seconds:.2f} s"
        loaded = Path(f"/proc/{hello.pid}/maps").read_text()
        assert "torch" not in loaded
        hub.send("node-00000", Shutdown(reason="done"))
        assert warden.wait(5) == 0
    finally:
        hub.close()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise AssertionError(f"no Pss of {pid}")


def test_the_agent_imports_no_heavy_package():
    code = "import sys; import miles_hpc.agent.run; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"torch", "transformers", "submitit", "numpy", "aiohttp", "rich", "tomli_w"}


def test_the_generation_of_a_report_is_the_order_s(hub, node):
    hub.start(WORKER, "pass", n=9)
    assert hub.exited(WORKER, n=9).generation == Generation(1, 9)
