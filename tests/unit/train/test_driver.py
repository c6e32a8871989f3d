import asyncio
import json

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout.commits import Superseded, read_chain

pytestmark = pytest.mark.unit


def settings(steps=4, heldout="h", evaluate_every=0, **train):
    return msgspec.convert(
        {
            "train": {"save_every": 2, **train},
            "data": {"prompts": "p", "heldout": heldout},
            "eval": {"every": evaluate_every},
            "steps": steps,
        },
        Config,
    )


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def ledger(run_dir):
    return [json.loads(line)["group"] for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def test_a_fresh_run_publishes_before_it_evaluates_and_evaluates_before_its_first_rollout(surroundings, driver):
    around = surroundings()
    warm = {"data": "w"}
    asyncio.run(driver(around, settings(steps=1, warm_start=warm)).run())
    assert around.calls == [
        ("open", 1, None),
        ("init", 1, None),
        ("warm_start",),
        ("publish", 1),
        ("evaluate", 1),
        ("generate", 1, 1),
        ("train", 1),
        ("publish", 2),
        ("save", "00001.g1-1"),
        ("prepare_commit", 1),
        ("committed", 1),
        ("evaluate", 2),
    ]


def test_steps_are_committed_every_save_every_and_at_the_end(surroundings, driver):
    around = surroundings()
    asyncio.run(driver(around, settings(steps=5)).run())
    assert [call for call in around.calls if call[0] == "committed"] == [("committed", n) for n in (2, 4, 5)]
    chain = read_chain(around.run_dir)
    assert [(commit.kind, commit.step, commit.weight_version) for commit in chain] == [
        ("open", 0, 0),
        ("step", 2, 3),
        ("step", 4, 5),
        ("step", 5, 6),
    ]
    assert ledger(around.run_dir) == ["g1", "g2", "g3", "g4", "g5"]


def test_without_heldout_prompts_nothing_is_evaluated(surroundings, driver):
    around = surroundings()
    asyncio.run(driver(around, settings(heldout="")).run())
    assert [call for call in around.calls if call[0] == "evaluate"] == []


def test_evaluations_come_every_n_steps_and_after_the_last(surroundings, driver):
    around = surroundings()
    summary = asyncio.run(driver(around, settings(steps=5, evaluate_every=2)).run())
    assert [row.get("heldout") for row in rows(around.run_dir)] == [None, 0.2, None, 0.3, 0.4]
    assert summary.to_dict()["heldout"] == {"first": 0.1, "last": 0.4}


def test_a_metrics_line_has_what_readers_expect(surroundings, driver):
    around = surroundings(healed=3)
    asyncio.run(driver(around, settings(steps=1)).run())
    [row] = rows(around.run_dir)
    assert row == {
        "step": 1,
        "attempt": 0,
        "reward": 0.1,
        "tokens": 100,
        "tokens_per_s": 100.0,
        "seconds": {"rollout": 1, "train": 1, "update": 1, "save": 3, "evaluate": 1},
        "weight_version": 2,
        "healed": 3,
        "loss": 0.5,
        "grad_norm": 1.0,
        "rollout": {},
        "heldout": 0.2,
        "eval": {},
    }


def test_the_hub_hears_of_every_step(surroundings, driver):
    around = surroundings()
    asyncio.run(driver(around).run())
    assert [part["steps"] for part in around.progress] == [0, 1, 2, 3, 4]
    assert around.progress[-1]["reward"] == {"first": 0.1, "last": 0.4, "best": 0.4}
    assert around.progress[-1]["groups"] == {"dispatched": 4, "committed": 4, "returned": 0, "dropped": {}}


def test_a_resumed_run_goes_on_from_the_last_commit_in_the_next_incarnation(surroundings, driver):
    first = surroundings(fail_at=("train", 4))
    with pytest.raises(RuntimeError, match="the script says so"):
        asyncio.run(driver(first).run())
    second = surroundings(done=2, trainer_generation="1-1")
    summary = asyncio.run(driver(second, attempt=1).run())
    assert second.calls[:5] == [
        ("open", 2, {"place": 2}),
        ("init", 2, 2),
        ("publish", 4),
        ("generate", 3, 4),
        ("train", 3),
    ]
    assert ("warm_start",) not in second.calls
    assert ledger(second.run_dir) == ["g1", "g2", "g3", "g4"]
    assert [(row["step"], row["attempt"]) for row in rows(second.run_dir)] == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 1)]
    assert summary.to_dict()["reward"] == {"first": 0.1, "last": 0.4, "best": 0.4}
    assert summary.to_dict()["heldout"] == {"first": 0.1, "last": 0.1}


def test_a_run_that_failed_before_its_first_commit_begins_again(surroundings, driver):
    with pytest.raises(RuntimeError):
        asyncio.run(driver(surroundings(fail_at=("train", 1))).run())
    again = surroundings()
    asyncio.run(driver(again, settings(warm_start={"data": "w"}), attempt=1).run())
    assert again.calls[:4] == [("open", 2, None), ("init", 2, None), ("warm_start",), ("publish", 1)]


def test_a_run_that_was_committed_to_its_end_is_only_evaluated(surroundings, driver):
    asyncio.run(driver(surroundings()).run())
    again = surroundings(heldout=[0.9])
    summary = asyncio.run(driver(again, attempt=1).run())
    assert again.calls == [("open", 2, {"place": 4}), ("init", 2, 4), ("publish", 6), ("evaluate", 6)]
    assert summary.to_dict()["heldout"] == {"first": 0.1, "last": 0.9}
    assert summary.to_dict()["steps"] == 4


def test_checkpoints_have_a_path_of_their_own_and_the_newest_are_kept(surroundings, driver):
    around = surroundings()
    asyncio.run(driver(around, settings(steps=6, keep_checkpoints=2)).run())
    assert sorted(path.name for path in (around.run_dir / "checkpoints").iterdir()) == ["00004.g1-1", "00006.g1-1"]


def test_a_step_that_is_saved_again_by_a_later_attempt_gets_another_path(surroundings, driver):
    with pytest.raises(RuntimeError):
        asyncio.run(driver(surroundings(fail_at=("prepare_commit", 2))).run())
    again = surroundings()
    asyncio.run(driver(again, settings(steps=2), attempt=1).run())
    newest = read_chain(again.run_dir)[-1]
    assert newest.checkpoint.path == "checkpoints/00002.g1-1.2"
    assert [path.name for path in (again.run_dir / "checkpoints").iterdir()] == ["00002.g1-1.2"]


def test_an_older_driver_loses_its_next_commit_to_a_newer_one(surroundings, driver):
    old, new = surroundings(), surroundings()
    newer = driver(new, attempt=1)

    async def publish_late(above):
        if above == 1:
            newer._commits.open()
        return above + 1

    older = driver(old)
    older._publisher.publish = publish_late
    with pytest.raises(Superseded):
        asyncio.run(older.run())
    assert ("committed", 2) not in old.calls
    assert [commit.kind for commit in read_chain(old.run_dir)] == ["open", "open"]
