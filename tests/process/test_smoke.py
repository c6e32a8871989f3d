"""`miles-hpc run smoke` as a user starts it: what it costs, what it leaves, and their own files on top of it."""

from __future__ import annotations

import re

import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.train.make_model import make_model

from ..whole_run import Measured, marked, measured

pytestmark = pytest.mark.process

GROUPS = 20 * 8


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measured(tmp_path_factory.mktemp("smoke") / "run", "smoke")


def test_it_is_done_in_seconds_and_its_processes_are_small(smoke):
    assert smoke.code == 0, smoke.out
    assert smoke.seconds <= smoke.allowed(25), smoke.out
    assert 100 < smoke.pss_mib <= 1024
    # The command draws the report in itself, after everything else has ended.
    assert smoke.libraries <= {"matplotlib"}
    assert list(marked(smoke.run_dir)) == []


def test_the_summary_has_the_promised_shape_and_adds_up(smoke):
    summary = smoke.json("summary.json")
    seconds = summary.pop("seconds")
    assert list(seconds) == ["ready", "first_step", "total"]
    assert 0 < seconds["ready"] < seconds["first_step"] < seconds["total"] < smoke.seconds
    rewards = [row["reward"] for row in smoke.rows("metrics.jsonl")]
    assert 0 < min(rewards) < max(rewards) < 1
    heldout = summary.pop("heldout")
    assert list(heldout) == ["first", "last"] and 0 < heldout["first"] == heldout["last"] < 1
    assert summary == {
        "outcome": "finished",
        "reason": "",
        "exit_code": 0,
        "attempt": 0,
        "steps": 20,
        "weight_version": 21,
        "reward": {"first": rewards[0], "last": rewards[-1], "best": max(rewards)},
        "groups": {"dispatched": GROUPS, "committed": GROUPS, "returned": 0, "dropped": {}},
        "cells": {"started": 11, "healed": 0},
    }
    assert smoke.json("verdicts/attempt-0.json") == smoke.json("summary.json")


def test_metrics_are_one_object_a_step(smoke):
    rows = smoke.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["weight_version"] for row in rows] == list(range(2, 22))
    for row in rows:
        assert {"attempt", "reward", "tokens", "tokens_per_s", "healed", "loss", "grad_norm", "seconds"} <= set(row)
        assert {"rollout", "train", "update", "save"} <= set(row["seconds"])
    assert [row["step"] for row in rows if "heldout" in row] == [20]


def test_the_ledger_is_one_line_for_each_committed_group(smoke):
    lines = smoke.rows("ledger.jsonl")
    assert all(
        list(line) == ["step", "group", "prompt_index", "epoch", "samples", "digest", "weight_versions", "attempt"]
        for line in lines
    )
    assert len(lines) == GROUPS == len({line["group"] for line in lines})
    assert [line["step"] for line in lines] == [step for step in range(1, 21) for _ in range(8)]
    # 96 prompts: the whole first data epoch, and a part of the second.
    assert sorted(line["prompt_index"] for line in lines if line["epoch"] == 0) == list(range(96))
    assert len({line["prompt_index"] for line in lines if line["epoch"] == 1}) == GROUPS - 96
    # The first weights are there before the first rollout, and each step's rollout has that step's weights.
    assert all(line["weight_versions"] == [line["step"]] for line in lines)


def test_it_leaves_report_picture_logs_and_the_last_checkpoints(smoke):
    directory = smoke.run_dir
    page = (directory / "report.html").read_text()
    assert "data:image/png;base64," in page and not re.search(r"(src|href)=['\"](?!data:)", page)
    assert (directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["00015.g1-1", "00020.g1-1"]
    assert sorted(path.name for path in (directory / "weights").iterdir() if path.is_dir()) == ["00020", "00021"]
    logs = directory / "logs" / "latest"
    assert logs.resolve().name == "attempt-0" and (logs / "hub.jsonl").is_file()
    workers = {path.name.partition(".")[0] for path in logs.glob("*/*.g1-1.log")}
    assert len(workers) == 12 and {"driver-00000-00000", "trainer-00000-00001"} <= workers
    assert all((logs / node / "agent.jsonl").is_file() for node in ("node-00000", "node-00001"))
    assert (directory / "secrets").stat().st_mode & 0o777 == 0o700


def test_a_finished_run_goes_on_when_it_is_given_more_steps(smoke):
    again = measured(smoke.run_dir, "--resume", "--set", "steps=22")
    assert again.code == 0 and "finished after 22 steps" in again.out, again.out
    assert [line["step"] for line in again.rows("ledger.jsonl")][GROUPS:] == [21] * 8 + [22] * 8
    assert again.json("summary.json")["attempt"] == 1
    assert again.json("summary.json")["weight_version"] > 21


def test_ones_own_parquet_prompts_model_directory_and_keys_on_top_of_a_recipe(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"question": f"What is {number} + 1?", "answer": number + 1, "other": "x"} for number in range(40)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, tmp_path / "model")
    (tmp_path / "my.toml").write_text(
        """
steps = 2
[model]
path = "model"
[data]
prompts = "prompts.parquet@[8:40]"
prompt_key = "question"
label_key = "answer"
heldout = ""
[reward]
function = "math_verify"
"""
    )
    done = measured(tmp_path / "run", "smoke", "my.toml", "--set", "model.make=none", "--set", "rollout.batch_size=16")
    assert done.code == 0, done.out
    assert done.json("summary.json")["reward"]["best"] > 0
    assert sorted(line["prompt_index"] for line in done.rows("ledger.jsonl")) == list(range(32))
