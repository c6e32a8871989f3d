"""`sbatch/rollouts.sbatch` with a trainer of its own, and `sbatch/eval.sbatch`."""

from __future__ import annotations

import json
import sys

import pytest

from tests.slurm.conftest import ROOT, Bed

pytestmark = pytest.mark.slurm

OPTIONS = ("--nodes=2", "--cpus-per-task=4", "--time=10")
TRAINER = """
import os, miles_hpc
client = miles_hpc.connect(os.environ["RUN_DIR"])
for batch in client.batches():
    client.publish_weights(sorted(client.run_dir.glob("weights/0*[0-9]"))[-1])
    client.commit(metrics={"loss": float(batch.rewards.mean())})
    print("trained", batch.rollout_id, len(batch), flush=True)
    FAIL
"""


def submit(bed: Bed, name: str, *arguments: str):
    job = bed.submit(*arguments, options=OPTIONS, script=ROOT / "sbatch" / f"{name}.sbatch")
    job.run_dir = bed.folder / "runs" / f"{name}-{job.id}"
    return job


def test_a_trainer_beside_the_agents_pulls_publishes_and_ends_with_the_run(bed: Bed, tmp_path):
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER.replace("FAIL", ""))
    job = submit(bed, "rollouts", "smoke", "--set", "steps=4", "--", sys.executable, str(program))
    assert job.wait(150) == "COMPLETED", job.said()
    assert job.accounted() == ("COMPLETED", "0:0")
    assert [row["step"] for row in job.metrics()] == [1, 2, 3, 4] and all("loss" in row for row in job.metrics())
    assert job.said().count("trained") == 4 and len(job.ledger()) == 32
    assert job.processes() == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_trainer_that_leaves_early_lets_the_run_drain_instead_of_waiting_for_it(bed: Bed, tmp_path, code):
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER.replace("FAIL", f"raise SystemExit({code})"))
    job = submit(bed, "rollouts", "smoke", "--set", "steps=50", "--", sys.executable, str(program))
    job.wait(150)
    verdict = job.verdict()
    assert verdict["outcome"] == "drained" and f"the trainer ended with {code}" in verdict["reason"], job.said()
    assert job.processes() == []


def test_a_model_is_evaluated_and_its_rows_lie_in_the_run_directory(bed: Bed):
    job = submit(bed, "eval", "smoke")
    assert job.wait(150) == "COMPLETED", job.said()
    (row,) = job.metrics()
    assert row["eval"]["heldout/pass@1"] == row["heldout"]
    rows = [json.loads(line) for line in (job.run_dir / "eval" / "00001-heldout.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and {"prompt", "response", "reward"} <= set(rows[0])
