"""Recipes that no other test runs, from the command to the summary, with few steps."""

import pytest

from ..whole_run import measured

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

FEW = {
    "steps": "2",
    "data.reasoning_gym.size": "32",
    "rollout.batch_size": "4",
    "rollout.samples_per_prompt": "2",
    "rollout.max_response_tokens": "16",
    # A model that was made a moment ago is never right: every group would be refused.
    "rollout.filters": "[]",
    "train.save_every": "2",
    "session.servers": "0",
    "inference.engines": "1",
}


def test_reasoning_gym_problems_are_made_generated_for_judged_and_trained_on(tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs miles-hpc[gym]")
    sets = [word for key, value in FEW.items() for word in ("--set", f"{key}={value}")]
    run = measured(tmp_path / "run", "reasoning-gym", *sets, timeout_s=300)
    assert run.code == 0 and "finished after 2 steps" in run.out, run.out
    assert [row["step"] for row in run.rows("metrics.jsonl")] == [1, 2]
    rows = run.rows("ledger.jsonl")
    assert len(rows) == 8 and {row["samples"] for row in rows} == {2}
    # Over-sampled by a quarter: what is left over goes back.
    groups = run.json("summary.json")["groups"]
    assert groups["committed"] == 8 and groups["returned"] >= 1 and groups["dropped"] == {}
