"""`miles-hpc doctor` in an allocation: planted faults are named, with their node, and only those."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import BED, Bed, command

pytestmark = pytest.mark.slurm

# What this bed has by its nature: linuxproc.
NATURE = {"proctrack"}
THREE = ("--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=4")
SKEWED = "import time; real = time.time; time.time = lambda: real() + 90"


def diagnose(
    bed: Bed, *before: str, options: Sequence[str] = THREE, directory: Path | None = None
) -> set[tuple[str, str, str]]:
    """(check, level, node) of every finding that is not ok."""
    script = bed.folder / "doctor.sh"
    directory = directory or bed.folder
    script.write_text("#!/bin/bash\n" + "\n".join(before) + f"\nmiles-hpc doctor --directory {directory} --json\n")
    job = bed.submit(script=script, options=options)
    job.wait(120)
    text = job.output.read_text()
    found = next((line for line in text.splitlines() if line.startswith("[{")), None)
    assert found, text
    assert not list(bed.folder.glob("**/.doctor-*")), "nothing is left behind"
    rows: list[dict[str, Any]] = [row for row in json.loads(found) if row["level"] != "ok"]
    assert all(row["remedy"] for row in rows), rows
    return {(row["check"], row["level"], row["node"]) for row in rows if row["check"] not in NATURE}


def test_a_healthy_allocation_has_nothing_wrong(bed: Bed):
    assert diagnose(bed) == set()


def test_noexec_scratch_and_a_cut_route_are_named_and_only_those(bed: Bed):
    bed.tool("exec", "node2", "mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "tmpfs", "/var/tmp")
    bed.tool("exec", "node3", "ip", "route", "add", "blackhole", "10.78.0.12/32")
    try:
        found = diagnose(bed, "export TMPDIR=/var/tmp")
    finally:
        bed.tool("exec", "node2", "umount", "/var/tmp")
        bed.tool("exec", "node3", "ip", "route", "del", "blackhole", "10.78.0.12/32")
    # Both ends of a cut route see it.
    assert found == {("scratch", "warn", "node2"), ("mesh", "fail", "node2"), ("mesh", "fail", "node3")}


def test_a_daemon_bound_to_one_core_and_a_clock_that_is_off_are_named_and_only_those(bed: Bed):
    """A slurmd that was started on one core hands that on to every task; one node's clock is 90 s ahead."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("on a machine with one core every node is as it should be")
    daemon = (BED / "run" / "node2" / "slurmd.pid").read_text().strip()
    bed.tool("exec", "node2", "taskset", "-apc", str(cores[0]), daemon)
    bed.tool("exec", "node3", "mount", "-t", "tmpfs", "tmpfs", "/media")
    # A clock cannot be set for one node of a machine alone, and libfaketime breaks Python's waits: only node3 has this.
    place = "/media/sitecustomize.py"
    bed.tool("exec", "node3", "bash", "-c", f"echo '{SKEWED}' >{place}")
    try:
        found = diagnose(bed, "export PYTHONPATH=/media")
    finally:
        bed.tool("exec", "node3", "umount", "/media")
        bed.tool("exec", "node2", "taskset", "-apc", ",".join(map(str, cores)), daemon)
    assert found == {("cpus", "fail", "node2"), ("clock", "fail", "node3")}


@pytest.fixture
def without_links(bed: Bed) -> Iterator[Path]:
    """A directory of node1's on exFAT, which has no hard links."""
    if shutil.which("mkfs.exfat") is None or shutil.which("mount.exfat-fuse") is None:
        pytest.skip("exfatprogs and exfat-fuse are not installed: no file system without link(2)")
    image, place = bed.folder / "exfat.img", bed.folder / "exfat"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    command("mkfs.exfat", image)
    device = command("losetup", "--find", "--show", image).strip()
    try:
        bed.tool("exec", "node1", "mount.exfat-fuse", device, str(place))
        yield place
        bed.tool("exec", "node1", "umount", str(place))
    finally:
        command("losetup", "--detach", device)


def test_a_file_system_without_hard_links_is_named_and_only_that(bed: Bed, without_links: Path):
    found = diagnose(bed, options=["--nodelist=node1", "--nodes=1", "--cpus-per-task=4"], directory=without_links)
    assert found == {("link", "fail", "node1")}


def test_on_a_login_node_it_looks_at_the_site_alone(bed: Bed, tmp_path):
    text = command(sys.executable, "-m", "miles_hpc.cli", "doctor", "--directory", tmp_path, "--json")
    found = json.loads(text)
    assert {row["check"] for row in found} >= {"slurm", "accounting", "cpus", "link", "scratch"}
    assert not any(row["level"] == "fail" for row in found)
