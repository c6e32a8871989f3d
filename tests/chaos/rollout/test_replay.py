"""Rollouts that were saved are trained on again, without anything that generates."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_run_on_saved_rollouts_has_no_engines_and_the_same_ledger(smoke):
    first = smoke("steps=3", "rollout.save_debug=true", name="first")
    assert first.end()["outcome"] == "finished", first.tail()
    second = smoke("steps=3", f"rollout.load_debug={first.run_dir / 'rollouts'}", name="second")
    summary = second.end()
    assert (summary["outcome"], summary["steps"]) == ("finished", 3), second.tail()
    # Executor, trainer and driver; nothing was dispatched, since nothing was generated.
    assert summary["cells"]["started"] == 3
    assert summary["groups"] == {"dispatched": 0, "committed": 0, "returned": 0, "dropped": {}}
    assert second.ledger() == first.ledger()
    rewards = [[row["reward"] for row in run.metrics()] for run in (first, second)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 3
    assert [row["rollout"]["repetitive"] for row in second.metrics()] == [0.0] * 3  # what was counted is kept, too
    assert second.left() == []
