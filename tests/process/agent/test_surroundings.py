"""What real workers find around themselves: bounded logs, control groups, GPUs, scratch directories, counters."""

from __future__ import annotations

import ast
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.agent import cgroups, procfs, worker_logs
from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import ClusterConfig, Config, GpuConfig, InferenceConfig
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Probe, StartWorker, WorkerExited

from .conftest import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]

WORKER = "pool-00000-00000"
IDLE = "import signal; signal.pause()"


def _agent_log(run_dir: Path) -> str:
    path = run_dir / "logs/attempt-0/node-00000/agent.jsonl"
    return path.read_text() if path.exists() else ""


# --------------------------------------------------------------------------------------------------- logs
WRITES_A_GIGABYTE = """
import os, sys
print("the first line", flush=True)
block = (b"x" * 1023 + b"\\n") * 1024
for _ in range(1024):
    os.write(1, block)
print("the last line", flush=True)
"""


def test_of_a_gigabyte_of_log_head_and_tail_are_kept(hub, node):
    hub.start(WORKER, WRITES_A_GIGABYTE)
    ended = hub.exited(WORKER, timeout_s=60)
    assert ended.exit_code == 0 and ended.log_tail.endswith("the last line\n")
    path = Path(ended.log_path)
    assert eventually(lambda: path.stat().st_size <= worker_logs.LIMIT, 20)
    with path.open("rb") as file:
        assert file.readline() == b"the first line\n"
        file.seek(worker_logs.HEAD)
        file.readline()
        assert b"bytes are left out here" in file.readline()
        file.seek(-14, os.SEEK_END)
        assert file.read() == b"the last line\n"
    assert path.stat().st_size >= worker_logs.HEAD + worker_logs.TAIL


def test_the_environment_of_a_worker_lies_beside_its_log_without_secrets(hub, nodes):
    nodes.start(env={"MY_API_KEY": "hunter2", "MY_SETTING": "seen", "NCCL_SOCKET_IFNAME": "hsn"})
    hello = hub.join()
    assert (hello.interface, hello.python, hello.kernel) == ("lo", platform.python_version(), platform.release())
    program = "import os; print({name: value for name, value in os.environ.items()})"
    hub.start(WORKER, program)
    log = Path(hub.exited(WORKER).log_path)
    kept = log.with_name(f"{WORKER}.g1-1.env.json")
    assert eventually(lambda: kept.exists() and kept.read_text().endswith("}\n"))
    assert kept.stat().st_mode & 0o777 == 0o600
    shown, effective = json.loads(kept.read_text()), ast.literal_eval(log.read_text())
    assert (shown["MY_SETTING"], shown["MY_API_KEY"], effective["MY_API_KEY"]) == ("seen", "***", "hunter2")
    assert (shown["GLOO_SOCKET_IFNAME"], shown["NCCL_SOCKET_IFNAME"]) == ("lo", "hsn")
    # The marks are the supervisor's; Python itself may set LC_CTYPE.
    assert effective.keys() - shown.keys() <= {procfs.MARK, "SPT_NOENV", "LC_CTYPE"}
    assert not [line for path in log.parent.rglob("*.json*") if "hunter2" in (line := path.read_text())]


# ----------------------------------------------------------------------------------------- control groups
@pytest.fixture
def groups(node):
    probe = cgroups.WorkerGroups(f"mh-probe-{os.getpid()}")
    usable = probe.usable
    probe.close()
    if not usable:
        pytest.skip("this machine lets nobody make control groups")


def _group_of(pid: int) -> Path:
    """The worker's own group; other agents of this machine have groups of the same name."""

    def found() -> list[Path]:
        return [
            path for own in cgroups.own_groups() for path in own.glob(f"mh*/{WORKER}") if pid in cgroups.members(path)
        ]

    assert eventually(lambda: len(found()) == 1), found()
    return found()[0]


def test_a_worker_and_all_that_it_starts_are_in_a_group_of_its_own_that_goes_with_it(hub, node, groups):
    started = hub.start(WORKER, f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {IDLE!r}])\n{IDLE}")
    group = _group_of(started.pid)
    assert eventually(lambda: len(cgroups.members(group)) == 2)
    assert started.pid in cgroups.members(group)
    hub.stop(WORKER)
    hub.exited(WORKER)
    assert not group.exists()


def test_no_group_outlives_a_node_whose_agent_was_killed(hub, node, nodes, groups):
    group = _group_of(hub.start(WORKER, IDLE).pid)
    nodes.wardens["node-00000"].send_signal(signal.SIGQUIT)
    assert nodes.wardens["node-00000"].wait(40) == 1
    assert not group.parent.exists()


def test_what_the_kernel_kills_for_lack_of_memory_is_called_by_its_name(hub, node, groups):
    hub.start(WORKER, "import sys, time\nwhile not sys.stdin.read(1): time.sleep(0.05)")
    hub.stop(WORKER)
    hub.exited(WORKER)
    eats = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\nx = b'x' * (512 << 20)"
    go = hub.run_dir / "go"
    started = hub.start(WORKER, eats, n=2, arguments=(str(go),))
    group = _group_of(started.pid)
    limit = next((group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()), None)
    if limit is None:
        pytest.skip("the memory controller is not handed down here")
    limit.write_text(str(64 << 20))
    go.touch()
    ended = hub.exited(WORKER, n=2)
    assert (ended.signal, ended.oom) == (9, "yes")


def test_a_kill_by_somebody_else_is_no_lack_of_memory(hub, node, groups):
    os.kill(hub.start(WORKER, IDLE).pid, signal.SIGKILL)
    ended = hub.exited(WORKER)
    assert (ended.signal, ended.oom) == (9, "no")


# --------------------------------------------------------------------------------------------------- GPUs
NVML = """
import json, os
from types import SimpleNamespace
def _state(): return json.load(open(os.environ["FAKE_NVML"]))
class NVMLError(Exception): pass
def nvmlInit(): _state()
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(_state())
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return [gpu["uuid"] for gpu in _state()].index(uuid)
def nvmlDeviceGetUUID(handle): return _state()[handle]["uuid"]
def nvmlDeviceGetName(handle): return "Fake 9000"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=100 << 20, free=_state()[handle]["free"] << 20)
def nvmlDeviceGetComputeRunningProcesses(handle): return [SimpleNamespace(pid=pid) for pid in _state()[handle]["pids"]]
def nvmlDeviceGetMigMode(handle):
    if "mig" not in _state()[handle]: raise NVMLError("Not Supported")
    return [_state()[handle]["mig"], 0]
"""
WANTS_GPUS = InferenceConfig(gpus_per_engine=1)
SHOWS_GPUS = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('CUDA_DEVICE_ORDER'), flush=True)"


class FakeNvml:
    def __init__(self, directory: Path, gpus: int = 3) -> None:
        (directory / "pynvml.py").write_text(NVML)
        self.path = directory / "gpus.json"
        self.gpus = [{"uuid": f"GPU-{i}{i}{i}{i}", "free": 98, "pids": []} for i in range(gpus)]
        self.env = {"PYTHONPATH": str(directory), "FAKE_NVML": str(self.path)}
        self.change()

    def change(self, index: int = 0, **values: object) -> None:
        self.gpus[index].update(values)
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(self.gpus))
        draft.replace(self.path)


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path)


@pytest.mark.parametrize(
    ("visible", "slots", "told"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["GPU-2222", "GPU-0000"], "2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1111,GPU-0000"}, ["GPU-1111", "GPU-0000"], "GPU-1111"),
        ({"SLURM_STEP_GPUS": "1,2"}, ["GPU-1111", "GPU-2222"], "1"),
        ({"SLURM_STEP_GPUS": "6,7"}, ["GPU-0000", "GPU-1111", "GPU-2222"], "0"),
    ],
)
def test_gpu_slots_are_what_nvml_shows_and_the_environment_allows(hub, nodes, nvml, visible, slots, told):
    nodes.start(env={**nvml.env, **visible})
    hello = hub.join()
    assert [gpu.uuid for gpu in hello.gpus] == slots
    assert hello.gpus[0].name == "Fake 9000" and hello.gpus[0].memory_bytes == 100 << 20
    hub.start(WORKER, SHOWS_GPUS, gpu_uuids=slots[:1])
    assert hub.exited(WORKER).log_tail == f"{told} PCI_BUS_ID\n"
    hub.start("pool-00001-00000", SHOWS_GPUS)
    assert hub.exited("pool-00001-00000").log_tail == " PCI_BUS_ID\n"


def test_a_gpu_whose_memory_somebody_holds_is_waited_for(hub, nodes, nvml):
    nvml.change(0, free=50, pids=[os.getpid()])
    nodes.start(env=nvml.env)
    hub.join()
    order = StartWorker(
        worker=WORKER,
        generation=Generation(1, 1),
        argv=[sys.executable, "-c", IDLE],
        env={},
        ports={},
        probe=Probe(),
        gpu_uuids=["GPU-0000"],
    )
    hub.send("node-00000", order)
    hub.send("node-00000", order)
    assert hub.until(lambda: "gpus_awaited" in _agent_log(hub.run_dir), "wait")
    nvml.change(0, free=99, pids=[])
    hub.ready(WORKER)


@pytest.mark.parametrize("foreign", ["refuse", "warn"])
def test_who_holds_a_gpu_for_good_is_named(hub, nodes, nvml, foreign):
    write_resolved(Config(gpu=GpuConfig(foreign=foreign, wait_s=0.5)), hub.run_dir)
    nvml.change(0, free=50, pids=[os.getpid()])
    nodes.start(env=nvml.env)
    hub.join()
    order = StartWorker(
        worker=WORKER,
        generation=Generation(1, 1),
        argv=[sys.executable, "-c", IDLE],
        env={},
        ports={},
        probe=Probe(),
        gpu_uuids=["GPU-0000"],
    )
    hub.send("node-00000", order)
    if foreign == "refuse":
        ended = hub.exited(WORKER)
        assert ended.cause == "spawn_failed" and f"pid {os.getpid()}" in ended.text and "50 of 100 MiB" in ended.text
    else:
        hub.ready(WORKER)
        assert "gpus_held" in _agent_log(hub.run_dir)


def test_a_gpu_that_stays_held_when_its_worker_has_stopped_is_said_at_once_with_the_holder(hub, nodes, nvml):
    write_resolved(Config(gpu=GpuConfig(wait_s=0.5)), hub.run_dir)
    nodes.start(env=nvml.env)
    hub.join()
    hub.start(WORKER, IDLE, gpu_uuids=["GPU-0000"])
    nvml.change(0, free=50, pids=[os.getpid()])
    hub.stop(WORKER)
    hub.exited(WORKER)
    assert eventually(lambda: "gpus_not_released" in _agent_log(hub.run_dir))
    said = [line for line in map(json.loads, _agent_log(hub.run_dir).splitlines()) if line["event"].startswith("gpus")]
    assert [line["worker"] for line in said] == [WORKER]
    assert f"pid {os.getpid()}" in said[0]["held"] and "50 of 100 MiB" in said[0]["held"]


@pytest.mark.parametrize("wanted", [True, False])
def test_mig_is_refused_in_one_line_where_gpus_are_wanted(hub, nodes, nvml, wanted):
    write_resolved(Config(inference=WANTS_GPUS if wanted else InferenceConfig()), hub.run_dir)
    nvml.change(1, mig=1)
    warden = nodes.start(env=nvml.env)
    if wanted:
        assert warden.wait(40) == 1
        log = (hub.run_dir / "logs/attempt-0/node-00000/warden.log").read_text().splitlines()
        assert len(log) == 1 and "MIG mode" in log[0] and "GPU 1" in log[0]
    else:
        assert hub.join().gpus == []


# ------------------------------------------------------------------------------------------------ scratch
@pytest.fixture
def noexec(tmp_path: Path):
    place = tmp_path / "noexec"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec,size=1m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_scratch_on_a_noexec_file_system_falls_through_to_the_next_place(hub, nodes, noexec, tmp_path):
    write_resolved(Config(cluster=ClusterConfig(scratch=str(noexec))), hub.run_dir)
    (tmp_path / "t").mkdir()
    nodes.start(env={"SLURM_TMPDIR": str(noexec / "missing"), "TMPDIR": str(tmp_path / "t")})
    hub.join()
    names = ["TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"]
    hub.start(WORKER, f"import os; print(*(os.environ[name] for name in {names}), sep='\\n')")
    for line in hub.exited(WORKER).log_tail.splitlines():
        assert line.startswith(str(tmp_path / "t"))


def test_the_scratch_directory_of_the_run_file_comes_first(hub, nodes, tmp_path):
    (tmp_path / "mine").mkdir()
    write_resolved(Config(cluster=ClusterConfig(scratch=str(tmp_path / "mine"))), hub.run_dir)
    nodes.start()
    hub.join()
    hub.start(WORKER, "import os; print(os.environ['TMPDIR'])")
    assert hub.exited(WORKER).log_tail.startswith(str(tmp_path / "mine"))


# --------------------------------------------------------------------------------------- progress, pauses
COUNTS = """
import sys, time
from miles_hpc.wire.progress import ProgressCounter
counter = ProgressCounter.from_environ()
for _ in range(int(sys.argv[1])):
    counter.bump()
    time.sleep(0.05)
print("stands still", flush=True)
time.sleep(1000)
"""


def test_a_worker_whose_counter_stands_still_is_stopped(hub, node):
    hub.start(WORKER, COUNTS, probe=Probe(stall=1.5), arguments=("40",))
    ended = hub.exited(WORKER, timeout_s=30)
    assert ended.cause == "probe_failed" and "progress counter stands at 40" in ended.text
    assert "stands still" in ended.log_tail


def test_a_pause_of_the_whole_node_is_held_against_no_worker(hub, node):
    """As when a machine is suspended: agent and worker stand still together, and go on together."""
    started = hub.start(WORKER, COUNTS, probe=Probe(stall=2.0), arguments=("100000",))
    hub.ready(WORKER)
    for pid in (node.pid, started.pid):
        os.kill(pid, signal.SIGSTOP)
    pause = time.monotonic()
    hub.until(lambda: time.monotonic() - pause > 4.0, "end of the pause")
    for pid in (node.pid, started.pid):
        os.kill(pid, signal.SIGCONT)
    beats = len(hub.beats())
    hub.until(lambda: len(hub.beats()) > beats + 15, "three seconds of heartbeats")
    assert not hub.reports(WorkerExited) and "stood_still" in _agent_log(hub.run_dir)
    assert procfs.read_process(started.pid) is not None


# ------------------------------------------------------------------------------------------- limits, grants
@pytest.mark.parametrize(("hard", "works"), [(256, False), (4096, True)])
def test_the_limit_of_open_files_is_raised_or_the_number_needed_is_said(hub, nodes, hard, works):
    warden = nodes.start(prefix=("sh", "-c", f'ulimit -Sn 256 && ulimit -Hn {hard} && exec "$@"', "sh"))
    if works:
        agent = hub.join()
        limits = Path(f"/proc/{agent.pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3] == str(hard)
    else:
        assert warden.wait(40) == 1
        log = (hub.run_dir / "logs/attempt-0/node-00000/warden.log").read_text()
        assert "at most 256 open files" in log and "512 are needed" in log


def test_what_slurm_granted_is_compared_with_what_there_is(hub, nodes):
    nodes.start(0, "--granted-cpus", "4096", "--granted-memory", str(1 << 60), "--granted-gpus", "8")
    differs = hub.join().differs
    assert len(differs) == 3 and "4096 CPUs" in differs[0] and "8 were granted" in differs[2]
