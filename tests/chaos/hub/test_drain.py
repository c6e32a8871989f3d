"""A drain from outside: the run ends in order with a commit, and the next attempt goes on from it."""

import json

import pytest

from miles_hpc.wire.operator import OperatorClient

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_an_operators_drain_commits_the_steps_that_are_done(smoke):
    run = smoke("steps=400", "train.save_every=100")
    run.reach(5)
    with OperatorClient(run.run_dir) as operator:
        operator.drain("maintenance at noon")
    summary = run.end(60)
    assert run.process.returncode == 75 and summary["outcome"] == "drained", run.tail()
    assert "maintenance at noon" in summary["reason"] and f"step {summary['steps']} is committed" in summary["reason"]
    lines = (run.run_dir / "ledger.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == set(range(1, summary["steps"] + 1))
