import json
from collections import Counter

import pytest

from miles_hpc.config.load import load, recipes_dir
from miles_hpc.engine.fake import right_answer
from miles_hpc.train.make_data import SECOND_TURN, file_text, make_rows, ways

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def made():
    return make_rows()


def test_the_shipped_files_are_those_that_make_data_makes(made):
    for name, rows in made.items():
        assert (recipes_dir() / name).read_text(encoding="utf-8") == file_text(rows)


def number(row):
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
    return int(prompt.split()[1])


def test_no_number_of_the_quickstart_is_in_two_files_and_no_sum_of_smoke_either(made):
    seen = Counter(number(row) for name, rows in made.items() if name.startswith("quickstart") for row in rows)
    assert set(seen.values()) == {1}
    sums = Counter(row["prompt"] for name, rows in made.items() if name.startswith("smoke") for row in rows)
    assert set(sums.values()) == {1}


def test_the_scripted_engine_is_asked_what_it_can_answer_for_more_than_one_data_epoch(made):
    for name in ("smoke.train.jsonl", "smoke.heldout.jsonl"):
        assert all(right_answer(row["prompt"]) == row["label"] for row in made[name])
    smoke = load(["smoke"])
    assert smoke.steps * smoke.rollout.batch_size > len(made["smoke.train.jsonl"])


def test_256_prompts_are_held_out_and_the_labels_are_many(made):
    assert len(made["quickstart.heldout.jsonl"]) == 256
    assert len({row["label"] for row in made["quickstart.heldout.jsonl"]}) >= 100
    assert all(row["label"] == str(number(row))[::-1] for row in made["quickstart.train.jsonl"])


def test_the_warm_start_teaches_the_right_way_as_the_rarest(made):
    taught = Counter()
    for row in made["quickstart.warm.jsonl"]:
        taught.update(way for way, answer in ways(number(row)).items() if answer == row["answer"])
    assert taught["copied"] > taught["rotated"] > taught["reversed"]
    assert taught["reversed"] / len(made["quickstart.warm.jsonl"]) < 0.3


def test_a_part_of_the_warm_start_is_a_second_turn_that_stays_with_the_first_answer(made):
    turns = [row for row in made["quickstart.warm.jsonl"] if isinstance(row["prompt"], list)]
    assert len(turns) == len(made["quickstart.warm.jsonl"]) / 4
    assert all(row["prompt"][1]["content"] == row["answer"] for row in turns)


@pytest.mark.parametrize("name", ["quickstart", "smoke"])
def test_a_recipe_has_the_topology_that_is_promised(name):
    config = load([name])
    assert (config.cluster.local_nodes, config.inference.engines, config.session.servers) == (2, 2, 2)
    assert (config.rollout.workers, config.train.ranks) == (2, 2)
    assert config.rollout.session_every and config.rollout.second_turn == SECOND_TURN


def test_smoke_needs_no_torch():
    config = load(["smoke"])
    assert (config.inference.engine, config.train.trainer, config.steps) == ("fake", "hash", 20)


def test_answers_fit_into_the_response_of_a_recipe():
    rows = [json.loads(line) for line in (recipes_dir() / "quickstart.train.jsonl").read_text().splitlines()]
    # One token a digit, and the end.
    assert max(len(row["label"]) for row in rows) + 1 <= load(["quickstart"]).rollout.max_response_tokens
