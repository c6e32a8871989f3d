"""`miles-hpc doctor` in an allocation: planted faults are named, with their node, and only those."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.slurm.conftest import Bed, command

pytestmark = pytest.mark.slurm

# What this bed has by its nature: three processes' worth of KillWait, linuxproc, no way out.
NATURE = {"proctrack", "killwait"}


def diagnose(bed: Bed, *before: str) -> list[dict[str, Any]]:
    script = bed.folder / "doctor.sh"
    script.write_text("#!/bin/bash\n" + "\n".join(before) + f"\nmiles-hpc doctor --directory {bed.folder} --json\n")
    job = bed.submit(script=script, options=["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=4"])
    job.wait(120)
    lines = [line for line in job.said().splitlines() if line.startswith("[")]
    text = job.output.read_text()
    assert lines or "[" in text, text
    found = json.loads(next(line for line in text.splitlines() if line.startswith("[{")))
    assert not list(bed.folder.glob(".doctor-*")), "nothing is left behind"
    return [row for row in found if row["level"] != "ok" and row["check"] not in NATURE]


def test_a_healthy_allocation_has_nothing_wrong(bed: Bed):
    assert diagnose(bed) == []


def test_noexec_scratch_and_a_cut_route_are_named_and_only_those(bed: Bed):
    bed.tool("exec", "node2", "mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "tmpfs", "/var/tmp")
    bed.tool("exec", "node3", "ip", "route", "add", "blackhole", "10.78.0.12/32")
    try:
        found = diagnose(bed, "export TMPDIR=/var/tmp")
    finally:
        bed.tool("exec", "node2", "umount", "/var/tmp")
        bed.tool("exec", "node3", "ip", "route", "del", "blackhole", "10.78.0.12/32")
    named = {(row["check"], row["node"]) for row in found}
    assert ("scratch", "node2") in named
    # Both ends of a cut route see it.
    assert {check for check, _ in named} == {"scratch", "mesh"}
    assert {node for check, node in named if check == "mesh"} == {"node2", "node3"}


def test_on_a_login_node_it_looks_at_the_site_alone(bed: Bed, tmp_path):
    text = command(sys.executable, "-m", "miles_hpc.cli", "doctor", "--directory", tmp_path, "--json")
    found = json.loads(text)
    assert {row["check"] for row in found} >= {"slurm", "accounting", "cpus", "link", "scratch"}
    assert not any(row["level"] == "fail" for row in found)
