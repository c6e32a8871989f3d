"""Inventory, scratch directories, the log, and the warden's options."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_hpc.agent import cgroups, gpus, inventory
from miles_hpc.agent.inventory import Granted
from miles_hpc.agent.log import JsonLog
from miles_hpc.agent.log_files import LogFiles, read_tail
from miles_hpc.agent.place import place_name
from miles_hpc.agent.run import parser
from miles_hpc.agent.scratch import Scratch, ScratchError, choose_base
from miles_hpc.agent.surroundings import NodeSurroundings, Surroundings, out_of_memory
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import Gpu, Probe, StartWorker

pytestmark = pytest.mark.unit

GPUS = [Gpu(uuid=f"GPU-{letter * 8}", index=i) for i, letter in enumerate("abc")]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bbbb", [1]),
        ("0, GPU-cccccccc", [0, 2]),
        ("1,7,0", [1]),
        ("NoDevFiles", []),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(allowed, expected):
    assert [gpu.index for gpu in gpus.visible(GPUS, allowed)] == expected


def test_local_nodes_share_cpus_and_memory():
    whole, parts = inventory.take(), [inventory.take(index, 2) for index in range(2)]
    assert whole.cpus == len(os.sched_getaffinity(0)) == sum(part.cpus for part in parts)
    assert all(0 < part.memory_bytes <= whole.memory_bytes / 2 for part in parts)


def test_local_nodes_get_disjoint_cpus_while_there_are_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 8, 9})
    assert [inventory.cpu_part(index, 2) for index in range(2)] == [{3, 4}, {5, 8, 9}]
    assert [inventory.cpu_part(index, 6) for index in range(6)] == [set()] * 6
    assert inventory.take(5, 6).cpus == 5 / 6


def test_what_differs_from_the_grant_is_said():
    found = inventory.Inventory(cpus=1.0, memory_bytes=1 << 30, gpus=[])
    assert inventory.differences(found, Granted()) == []
    assert inventory.differences(found, Granted(cpus=1, memory_bytes=1 << 30)) == []
    cpus, memory, gpu = inventory.differences(found, Granted(cpus=8, memory_bytes=2 << 30, gpus=4))
    assert "1 of the 8 CPUs" in cpus and "--cpus-per-task" in cpus
    assert "1024 MiB of the 2048 MiB" in memory and "0 GPUs, 4 were granted" in gpu
    assert inventory.differences(found, Granted(memory_bytes=1)) == []
    with_gpus = inventory.Inventory(cpus=1.0, memory_bytes=1 << 30, gpus=GPUS)
    assert inventory.differences(with_gpus, Granted()) == []
    assert inventory.differences(with_gpus, Granted(cpus=1)) == ["this agent sees 3 GPUs, 0 were granted to it"]


def test_a_memory_limit_of_the_control_group_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("12345\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "step" / "task").mkdir(parents=True)
    monkeypatch.setattr(inventory, "own_groups", lambda: [tmp_path / "step" / "task"])
    assert inventory.memory_limit() == 12345
    assert cgroups.oom_kills(tmp_path) == 2
    (tmp_path / "memory.max").write_text("max\n")
    assert inventory.memory_limit() > 12345


@pytest.fixture
def fake_cgroup_v2(tmp_path, monkeypatch):
    """A worker's group as version 2 shows it, with its agent's group above; the kernel's part is the test's."""
    agents = tmp_path / "fake_cgroup" / "job_7" / "step_0"
    workers = agents / "mh-x" / "pool-00000-00000"
    workers.mkdir(parents=True)
    for group in (agents, workers):
        (group / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n")
    monkeypatch.setattr(cgroups, "own_groups", lambda: [agents])
    monkeypatch.setattr(cgroups, "machine_oom_kills", lambda: 5)
    monkeypatch.setattr(cgroups, "memory_pressure", lambda: False)
    return agents, workers


def kernel_kills_in(group, kills=1):
    (group / "memory.events").write_text(f"low 0\nhigh 0\nmax 31\noom 2\noom_kill {kills}\noom_group_kill 0\n")


def surroundings(group, own=None, machine=None):
    return Surroundings(
        env={},
        scratch=Path("/x"),
        group=group,
        progress=SimpleNamespace(close=lambda: None),
        kills_before=(cgroups.own_oom_kills(), cgroups.machine_oom_kills()),
        own_kills=own or cgroups.Kills(),
        machine_kills=machine or cgroups.Kills(),
    )


@pytest.mark.parametrize("signal", [9, None])
def test_a_kill_in_the_worker_s_own_group_is_out_of_memory_whoever_of_it_was_hit(fake_cgroup_v2, signal):
    _, workers = fake_cgroup_v2
    found = surroundings(workers)
    assert out_of_memory(found, signal, killed_by_us=False) == "no"
    kernel_kills_in(workers)
    assert out_of_memory(found, signal, killed_by_us=False) == "yes"


def test_without_a_group_of_its_own_the_agent_s_group_tells(fake_cgroup_v2):
    agents, _ = fake_cgroup_v2
    found = surroundings(None)
    assert out_of_memory(found, 9, killed_by_us=False) == "no"
    kernel_kills_in(agents)
    assert out_of_memory(found, 9, killed_by_us=False) == "yes"
    assert out_of_memory(found, 9, killed_by_us=True) == out_of_memory(found, 11, killed_by_us=False) == "no"


def test_a_kill_of_the_kernel_explains_one_death_only(fake_cgroup_v2):
    agents, _ = fake_cgroup_v2
    kills = cgroups.Kills()
    first, second, third = (surroundings(None, kills) for _ in range(3))
    kernel_kills_in(agents)
    assert out_of_memory(first, 9, killed_by_us=False) == "yes"
    assert out_of_memory(second, 9, killed_by_us=False) == "no"
    kernel_kills_in(agents, 2)
    assert out_of_memory(third, 9, killed_by_us=False) == "yes"


def test_the_workers_of_a_node_share_the_count(fake_cgroup_v2, tmp_path):
    agents, _ = fake_cgroup_v2
    scratch = Scratch("k", {"TMPDIR": str(tmp_path)})
    node = NodeSurroundings(LogFiles(tmp_path / "local", tmp_path), scratch, groups=cgroups.WorkerGroups("unused", []))
    orders = [
        StartWorker(
            worker=f"pool-0000{n}-00000", generation=Generation(1, 1), argv=["x"], env={}, ports={}, probe=Probe()
        )
        for n in range(2)
    ]
    first, second = map(node.make, orders)
    kernel_kills_in(agents)
    assert out_of_memory(first, 9, killed_by_us=False) == "yes"
    node.remove(first)
    assert out_of_memory(second, 9, killed_by_us=False) == "no"
    node.remove(second)
    node.close()


def test_a_kill_that_was_there_at_an_earlier_death_is_that_worker_s_or_perhaps_another_s(fake_cgroup_v2):
    agents, _ = fake_cgroup_v2
    kills = cgroups.Kills()
    first, second, third = (surroundings(None, kills) for _ in range(3))
    kernel_kills_in(agents, 2)
    later = surroundings(None, kills)
    assert out_of_memory(first, 9, killed_by_us=False) == "yes"
    assert out_of_memory(later, 9, killed_by_us=False) == "no"
    assert out_of_memory(second, 9, killed_by_us=False) == "probable"
    assert out_of_memory(third, 9, killed_by_us=False) == "no"


def test_a_kill_of_the_machine_makes_one_death_probable(fake_cgroup_v2, monkeypatch):
    monkeypatch.setattr(cgroups, "own_groups", list)
    kills = cgroups.Kills()
    first, second = (surroundings(None, machine=kills) for _ in range(2))
    monkeypatch.setattr(cgroups, "machine_oom_kills", lambda: 6)
    assert out_of_memory(first, 9, killed_by_us=False) == "probable"
    assert out_of_memory(second, 9, killed_by_us=False) == "no"


def test_where_no_group_can_be_read_a_kill_of_the_machine_makes_it_probable(fake_cgroup_v2, monkeypatch):
    monkeypatch.setattr(cgroups, "own_groups", list)
    found = surroundings(None)
    assert out_of_memory(found, 9, killed_by_us=False) == "no"
    monkeypatch.setattr(cgroups, "machine_oom_kills", lambda: 6)
    assert out_of_memory(found, 9, killed_by_us=False) == "probable"
    monkeypatch.setattr(cgroups, "machine_oom_kills", lambda: 5)
    monkeypatch.setattr(cgroups, "memory_pressure", lambda: True)
    assert out_of_memory(found, 9, killed_by_us=False) == "probable"


def test_this_machine_s_own_groups_are_read_where_it_has_some():
    groups = cgroups.own_groups()
    counts = [count for group in groups if (count := cgroups.oom_kills(group)) is not None]
    if not counts:
        pytest.skip(f"no memory account can be read in {groups or 'any control group'}")
    assert all(count >= 0 for count in counts) and cgroups.own_oom_kills() == counts[0]


def test_gpus_of_amd_are_refused_in_one_line_where_gpus_are_wanted(tmp_path, monkeypatch):
    fake_kfd = tmp_path / "kfd"
    fake_kfd.touch()
    monkeypatch.setattr(gpus, "_KFD", fake_kfd)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(gpus.GpuError) as refused:
        gpus.find({})
    assert "ROCm" in str(refused.value) and "not supported yet" in str(refused.value) and "\n" not in str(refused.value)
    assert gpus.find({}, wanted=False) == []
    fake_kfd.unlink()
    assert gpus.find({}) == []


def test_oom_kills_are_unknown_without_a_control_group(monkeypatch):
    monkeypatch.setattr(cgroups, "own_groups", list)
    assert cgroups.own_oom_kills() is None


def test_without_a_place_of_ours_there_are_no_worker_groups(tmp_path):
    groups = cgroups.WorkerGroups("mh-test", [tmp_path / "missing", tmp_path])
    assert not groups.usable and groups.make("w") is None and cgroups.members(None) == []
    groups.close()


def test_scratch_is_the_first_usable_directory(tmp_path):
    missing = tmp_path / "missing"
    assert choose_base([str(missing), "", str(tmp_path)]) == tmp_path
    with pytest.raises(ScratchError, match=r"missing \(No such file or directory\).*set TMPDIR"):
        choose_base([str(missing)])


def test_each_worker_has_a_short_private_directory_that_goes_with_it(tmp_path):
    scratch = Scratch(place_name("/run", 0, "node-00000"), {"TMPDIR": str(tmp_path), "HOME": "/home/x"})
    first, second = scratch.make(), scratch.make()
    assert first != second and first.stat().st_mode & 0o777 == 0o700
    assert len(str(first)) - len(str(tmp_path)) < 30
    (first / "deep").mkdir()
    scratch.remove(first)
    assert not first.exists() and second.exists()
    scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_caches_of_compiled_code_follow_and_the_user_s_own_stay(tmp_path):
    scratch = Scratch("k", {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/mine"})
    values = scratch.variables(scratch.make())
    assert "TRITON_CACHE_DIR" not in values
    assert values["XDG_CACHE_HOME"].startswith(str(scratch.root))
    # Downloaded models must still be found.
    assert values["HF_HOME"].endswith("/.cache/huggingface")
    scratch.close()


def test_the_log_is_one_json_object_a_line(tmp_path, capsys):
    log = JsonLog(tmp_path / "deep" / "agent.jsonl", "node-00000")
    log.write("started", pid=1)
    log.write("worker_exited", "warning", path=Path("/x"), text="two\nlines")
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "deep" / "agent.jsonl").read_text().splitlines()]
    assert [(row["level"], row["source"], row["event"]) for row in rows] == [
        ("info", "node-00000", "started"),
        ("warning", "node-00000", "worker_exited"),
    ]
    assert rows[1]["path"] == "/x" and rows[0]["time"] <= rows[1]["time"]
    assert "worker_exited" in capsys.readouterr().err


@pytest.mark.parametrize("trouble", [BrokenPipeError(), ValueError("closed")], ids=repr)
def test_the_log_goes_on_where_stderr_fails(tmp_path, monkeypatch, trouble):
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise trouble

    monkeypatch.setattr(sys, "stderr", Gone())
    log = JsonLog(tmp_path / "agent.jsonl", "node-00000")
    for number in range(2):
        log.write("gpus_held", "warning", number=number)
    log.close()
    assert len((tmp_path / "agent.jsonl").read_text().splitlines()) == 2


def test_a_tail_is_the_end_of_a_file_and_never_fails(tmp_path):
    path = tmp_path / "log"
    assert read_tail(path, 10) == ""
    path.write_bytes(b"x" * 100 + b"\xff the end")
    assert read_tail(path, 8) == " the end"
    assert "�" in read_tail(path, 9)


def test_the_agent_s_options_have_defaults_for_a_plain_start():
    given = parser().parse_args(["--run-dir", "/r", "--attempt", "2", "--node-index", "1", "--address", "::1"])
    assert (given.hub, given.local_nodes, given.lifeline, given.incarnation) == (False, 1, -1, "")
