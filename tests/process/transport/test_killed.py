"""What a killed producer of batches leaves on its node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

PRODUCER = """
import sys
from miles_hpc.transport.segments import SegmentPool
pool = SegmentPool(1 << 24)
segment = pool.take(1 << 20)
print("laid out", flush=True)
sys.stdin.read()
"""


def test_the_segments_of_a_producer_have_no_name_that_could_outlive_it():
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as producer:
        assert producer.stdout is not None and producer.stdout.readline() == "laid out\n"
        maps = Path(f"/proc/{producer.pid}/maps").read_text().splitlines()
        producer.kill()
    shared = [line.split(maxsplit=5) for line in maps if line.split()[1].endswith("s")]
    names = [fields[5] for fields in shared if len(fields) == 6]
    assert any(name.startswith("/memfd:") for name in names), names
    assert not any("/dev/shm/" in name for name in names)
