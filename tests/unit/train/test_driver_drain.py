"""A run that drains: what is done is committed, what is under way is given up, what does not fit is named."""

import asyncio

import pytest

from miles_hpc.rollout.commits import read_chain

pytestmark = pytest.mark.unit


def committed(run_dir):
    return [commit.step for commit in read_chain(run_dir) if commit.kind == "step"]


def test_a_drain_during_a_rollout_gives_it_up_and_commits_the_steps_before_it(surroundings, driver):
    around = surroundings(drain_at=("generate", 4, 4))
    summary = asyncio.run(driver(around).run())
    assert committed(around.run_dir) == [2, 3]
    assert summary.step == 3 and summary.drained == "step 3 is committed"
    assert ("train", 4) not in around.calls


def test_a_drain_during_training_lets_the_step_end(surroundings, driver):
    around = surroundings(drain_at=("train", 3))
    summary = asyncio.run(driver(around).run())
    assert committed(around.run_dir) == [2, 3] and summary.drained == "step 3 is committed"


def test_a_step_that_is_committed_already_is_not_committed_again(surroundings, driver):
    around = surroundings(drain_at=("train", 2))
    summary = asyncio.run(driver(around).run())
    assert committed(around.run_dir) == [2] and summary.drained == "step 2 is committed"


def test_a_save_that_does_not_fit_is_left_out_and_the_lost_steps_are_named(surroundings, driver):
    around = surroundings(drain_at=("train", 3), drain_s=0.5)
    summary = asyncio.run(driver(around).run())
    assert committed(around.run_dir) == [2]
    assert "steps 3 to 3 will be done again" in summary.drained


def test_a_drain_before_the_first_step_commits_nothing(surroundings, driver):
    around = surroundings(drain_at=("init", 1, None))
    summary = asyncio.run(driver(around).run())
    assert summary.drained == "before its first step" and not committed(around.run_dir)


def test_the_resumed_run_does_the_steps_that_are_left(surroundings, driver):
    around = surroundings(drain_at=("generate", 4, 4))
    asyncio.run(driver(around).run())
    again = surroundings(done=3)
    summary = asyncio.run(driver(again, attempt=1).run())
    assert not summary.drained and [call for call in again.calls if call[0] == "train"] == [("train", 4)]


def test_a_drain_in_the_last_step_is_a_finished_run(surroundings, driver):
    around = surroundings(drain_at=("train", 4))
    summary = asyncio.run(driver(around).run())
    assert summary.step == 4 and not summary.drained
