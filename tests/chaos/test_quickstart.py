"""The main job as a new user starts it: a policy that learns, in minutes, on this machine's processors."""

import pytest

from ..whole_run import marked, measured

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("quickstart") / "run", "quickstart", timeout_s=800)


def test_the_policy_learns_what_the_reward_asks_for(quickstart):
    assert quickstart.code == 0, quickstart.out
    summary = quickstart.json("summary.json")
    assert summary["heldout"]["first"] <= 0.25 and summary["heldout"]["last"] >= 0.8, quickstart.out
    assert summary["reward"]["first"] <= 0.4 and summary["reward"]["best"] >= 0.9
    # What the engines claim for a token is what the trainer computes for it.
    assert max(row["logprob_gap"] for row in quickstart.rows("metrics.jsonl")) <= 1e-4


def test_it_takes_minutes(quickstart):
    seconds = quickstart.json("summary.json")["seconds"]
    assert seconds["first_step"] <= quickstart.allowed(60), quickstart.out
    assert seconds["total"] - seconds["first_step"] <= quickstart.allowed(180)
    assert quickstart.seconds <= quickstart.allowed(360)


def test_it_says_what_it_is_and_where_everything_lies(quickstart):
    lines = quickstart.out.splitlines()
    assert any(line.startswith("note: inference.engine = embedded") and "CPU engine" in line for line in lines)
    assert "2 nodes:" in lines and sum(line.startswith("step ") for line in lines) == 48
    assert any(line.startswith("held-out accuracy ") and " -> " in line for line in lines)
    places = dict(line.split(maxsplit=1) for line in lines[lines.index("all 11 cells ready") :] if " /" in line)
    assert set(places) == {"logs", "checkpoint", "metrics", "ledger", "summary", "report", "picture"}
    directory = quickstart.run_dir
    assert (directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (directory / "checkpoints" / "00048.g1-1" / "model.safetensors").is_file()
    assert list(marked(directory)) == []


def test_a_part_of_the_samples_are_exchanges_of_two_turns(quickstart):
    # A second turn makes a sample longer than the longest single answer.
    assert all(row["rollout"]["response_tokens_max"] > 8 for row in quickstart.rows("metrics.jsonl"))
