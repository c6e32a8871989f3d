"""The doctor's findings: each planted fault is named, and a healthy node has none."""

import errno
import os
import socket
from types import SimpleNamespace

import pytest

from miles_hpc.cli.doctor import together
from miles_hpc.launch import checks, mesh
from miles_hpc.launch.checks import Finding, NodeReport

pytestmark = pytest.mark.unit


def report(index: int = 0, **fields) -> NodeReport:
    return NodeReport(**{"host": f"node{index}", "index": index, "findings": [], **fields})


def test_a_file_system_without_link_is_named(tmp_path):
    def refuse(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    found = checks.link_check(tmp_path, refuse)
    assert (found.check, found.level) == ("link", "fail") and "Operation not permitted" in found.text
    assert checks.link_check(tmp_path, lambda s, t: None).level == "fail", "a link that replaces is none"
    assert checks.link_check(tmp_path).level == "ok"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_one_core_in_place_of_many_is_named(monkeypatch):
    environ = {"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_JOB_CPUS_PER_NODE": "16"}
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(checks.inventory, "usable_cpus", lambda: 1)
    found = checks.cpu_check(environ)
    assert (found.level, found.text) == (
        "fail",
        "1 of 16 granted CPUs may be used",
    ) and "--cpus-per-task" in found.remedy
    monkeypatch.setattr(checks.inventory, "usable_cpus", lambda: 16)
    assert checks.cpu_check(environ).level == "ok"
    assert checks.cpu_check({}).level == "ok", "outside of a job nothing was granted"


def test_scratch_that_cannot_be_executed_from_is_named_with_what_is_used_instead(tmp_path, monkeypatch):
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    real = os.statvfs

    def statvfs(name):
        found = real(name)
        values = {key: getattr(found, key) for key in ("f_bavail", "f_bfree", "f_blocks", "f_frsize")}
        flags = os.ST_NOEXEC if str(name).endswith("bad") else found.f_flag & ~os.ST_NOEXEC
        return SimpleNamespace(**values, f_flag=flags)

    monkeypatch.setattr(checks.os, "statvfs", statvfs)
    found = checks.scratch_check([str(tmp_path / "bad"), str(tmp_path / "good")])
    assert found.level == "warn" and f"bad (mounted noexec): {tmp_path}/good is used instead" in found.text
    assert checks.scratch_check([str(tmp_path / "bad"), str(tmp_path / "none")]).level == "fail"
    assert checks.scratch_check(["", str(tmp_path / "good")]).check == "scratch"


def test_a_clock_that_is_off_is_named_and_only_that_node_s():
    reports = [report(0), report(1), report(2)]
    found = list(checks.fleet_checks(reports, {"node0": 0.0, "node1": 3600.0, "node2": 0.2}))
    assert [(f.check, f.level, f.node) for f in found] == [("clock", "fail", "node1")]
    assert "+3600.0 s" in found[0].text
    assert [f.level for f in checks.fleet_checks(reports, {"node0": 0.0})] == ["ok"]


def test_nodes_with_other_gpus_are_named():
    found = list(checks.fleet_checks([report(0, gpus=["H100"] * 8), report(1, gpus=["H100"] * 7)], {}))
    assert found[0].check == "gpus" and "node0: 8 x H100; node1: 7 x H100" in found[0].text


def test_nodes_with_other_drivers_are_named(tmp_path):
    found = list(checks.fleet_checks([report(0, driver="550.54.15"), report(1, driver="535.104.05"), report(2)], {}))
    assert (found[0].check, found[0].level) == ("driver", "warn")
    assert "node0: 550.54.15; node1: 535.104.05; node2: none" in found[0].text
    assert [f.check for f in checks.fleet_checks([report(0, driver="1.2"), report(1, driver="1.2")], {})] == ["clock"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC 12.2\n", "570.86.15"),
        ("something else\n", ""),
    ],
)
def test_the_driver_s_version_is_read_from_the_kernel(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert checks.driver_version(tmp_path / "version") == version
    assert checks.driver_version(tmp_path / "none") == ""


def test_a_node_without_a_network_is_named(monkeypatch):
    monkeypatch.setattr(checks, "addresses", lambda: [("lo", "127.0.0.1"), ("lo", "::1")])
    assert checks.interface_check().level == "fail"
    monkeypatch.setattr(checks, "addresses", lambda: [("lo", "127.0.0.1"), ("ib0", "10.0.0.1"), ("eth0", "10.1.0.1")])
    assert (checks.interface_check().level, checks.interface_check().text) == ("ok", "eth0, ib0")


def test_a_node_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        good = report(1, addresses=["127.0.0.1"], port=port)
        assert mesh.reach([good])[0].level == "ok"
        with socket.create_server(("127.0.0.1", 0)) as other:
            closed = other.getsockname()[1]
        (found,) = mesh.reach([good, report(2, addresses=["127.0.0.1"], port=closed)])
    assert (found.check, found.level) == ("mesh", "fail") and found.text == "no TCP connection to node2 (127.0.0.1)"


def test_proxies_matter_only_without_exceptions():
    assert checks.proxy_check({"HTTPS_PROXY": "http://p"}).level == "warn"
    assert checks.proxy_check({"HTTPS_PROXY": "http://p", "no_proxy": "*"}).level == "ok"
    assert checks.proxy_check({}).level == "ok"


def test_an_offline_node_is_normal():
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()
    found = checks.route_check(closed[:2], 0.5)
    assert found.level == "ok" and "offline node" in found.text


def test_what_nodes_say_alike_is_one_line():
    same = [Finding(check="cpus", level="ok", text="16 CPUs", node=f"n{i}") for i in range(6)]
    other = Finding(check="cpus", level="fail", text="1 CPU", node="n9")
    assert [(f.level, f.node) for f in together([*same, other])] == [
        ("ok", "n0, n1, n2, n3 and 2 more"),
        ("fail", "n9"),
    ]
