"""Every state of a job has a meaning, whatever Slurm writes behind it; none that is unknown is taken for an end."""

import re
import shutil
import subprocess

import pytest

from miles_hpc.launch.job_states import Life, job_state

pytestmark = pytest.mark.unit

# JOB STATE CODES of `man squeue` (23.11), which has all of `man sacct`.
SQUEUE = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "CF": "CONFIGURING", "CG": "COMPLETING",
    "DL": "DEADLINE", "F": "FAILED", "NF": "NODE_FAIL", "OOM": "OUT_OF_MEMORY", "PD": "PENDING", "PR": "PREEMPTED",
    "R": "RUNNING", "RD": "RESV_DEL_HOLD", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "RQ": "REQUEUED",
    "RS": "RESIZING", "RV": "REVOKED", "SI": "SIGNALING", "SE": "SPECIAL_EXIT", "SO": "STAGE_OUT", "ST": "STOPPED",
    "S": "SUSPENDED", "TO": "TIMEOUT",
}  # fmt: skip
ENDS = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip


@pytest.mark.parametrize("short", sorted(SQUEUE))
def test_every_state_of_the_manual_is_known_in_both_forms(short):
    long = SQUEUE[short]
    assert job_state(short) == job_state(long) == job_state(long.lower())
    assert job_state(long).name == long
    assert job_state(long).life is not Life.UNKNOWN
    assert (job_state(long).life is Life.ENDED) == (long in ENDS)
    assert job_state(long).alive == (long not in ENDS)


@pytest.mark.parametrize(
    ("text", "name", "life"),
    [
        ("CANCELLED by 1000", "CANCELLED", Life.ENDED),
        ("CANCELLED+", "CANCELLED", Life.ENDED),
        ("COMPLETED*", "COMPLETED", Life.ENDED),
        (" RUNNING ", "RUNNING", Life.RUNNING),
        ("NODE_FAIL,COMPLETING", "COMPLETING", Life.RUNNING),
        ("PENDING,REQUEUED", "PENDING", Life.WAITING),
        ("SOMETHING_NEW", "SOMETHING_NEW", Life.UNKNOWN),
        ("SOMETHING_NEW,COMPLETED", "SOMETHING_NEW", Life.UNKNOWN),
        ("", "UNKNOWN", Life.UNKNOWN),
    ],
)
def test_suffixes_and_combinations(text, name, life):
    state = job_state(text)
    assert (state.name, state.life) == (name, life)


@pytest.mark.skipif(shutil.which("man") is None, reason="no man")
def test_the_table_has_what_the_installed_manual_lists():
    page = subprocess.run(["man", "squeue"], capture_output=True, text=True, check=False).stdout
    section = re.search(r"JOB STATE CODES(.*?)(\n[A-Z]{4,}|\Z)", page, re.DOTALL)
    if section is None:
        pytest.skip("no manual of Slurm here")
    listed = set(re.findall(r"^\s+[A-Z]{1,3}\s+([A-Z_]{6,})", section[1], re.MULTILINE))
    # The section's prose has words of that form, too.
    assert len(listed - {"REASON"}) >= 20
    assert [name for name in listed - {"REASON"} if job_state(name).life is Life.UNKNOWN] == []
