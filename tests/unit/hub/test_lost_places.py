"""Cells that have lost their place and find no other: the run gets on without them, or drains to be queued again."""

import pytest

pytestmark = pytest.mark.unit

GROUP = {"group": "training", "state": "stateful"}


def gpu_run(fleet, pool):
    """Three nodes of one GPU each: two engines, and a trainer without which nothing goes on."""
    made = fleet(
        pool("engine", num_cells=2, num_gpus_per_worker=1),
        pool("trainer", category="trainer", num_gpus_per_worker=1, **GROUP),
        pool("driver", category="driver", **GROUP),
        nodes=3,
        gpus=1,
    )
    assert set(made.phases().values()) == {"ready"}
    made.clear()
    return made


def node_of(f, cell):
    return int(f.cell(cell).workers[0].node[-5:])


def silence(f, index):
    f.agents[index].silent = True
    # From DEAD on, and past the fence, behind which stateful cells may be placed again.
    f.pass_time(f.timing.fence + 10)


def test_an_engine_that_fits_nowhere_is_done_without_and_placed_when_its_node_is_back(fleet, pool):
    f = gpu_run(fleet, pool)
    home = node_of(f, "engine-00001")
    silence(f, home)
    f.pass_time(5 * f.timing.replace_timeout, step=1.0)
    assert f.phases()["engine-00001"] == "waiting" and not f.verdicts and f.core.drain is None
    assert [note.event for note in f.notes].count("cell_unplaced") == 1
    f.agents[home].silent = False
    f.agents[home].table.clear()
    f.pass_time(12)
    assert set(f.phases().values()) == {"ready"}


def test_a_trainer_that_fits_nowhere_is_waited_for_and_then_the_run_drains_to_be_queued_again(fleet, pool):
    f = gpu_run(fleet, pool)
    silence(f, node_of(f, "trainer-00000"))
    since = f.cell("trainer-00000").unplaced_since
    assert since is not None and f.phases()["trainer-00000"] == "waiting"
    f.pass_time(since + f.timing.replace_timeout - 2 - f.now, step=1.0)
    assert not f.verdicts and f.core.drain is None
    f.pass_time(f.timing.drain + 5)
    (verdict,) = f.verdicts
    assert (verdict.outcome, verdict.exit_code, verdict.summary["requeue"]) == ("drained", 75, True)
    assert "nothing became free within 120 s (timing.replace_timeout)" in verdict.reason
    assert "cell trainer-00000 needs 1 GPU" in verdict.reason and "last commit" in verdict.reason


def test_a_place_that_comes_back_in_time_is_taken(fleet, pool):
    f = gpu_run(fleet, pool)
    home = node_of(f, "trainer-00000")
    silence(f, home)
    f.pass_time(f.timing.replace_timeout / 2, step=1.0)
    f.agents[home].silent = False
    f.agents[home].table.clear()
    f.pass_time(f.timing.replace_timeout, step=1.0)
    assert set(f.phases().values()) == {"ready"} and not f.verdicts and f.core.drain is None


def test_the_last_engine_of_a_pool_is_not_done_without(fleet, pool):
    f = fleet(pool("engine", num_gpus_per_worker=1), pool("driver", category="driver"), nodes=3, gpus=0, join=False)
    f.agents[1].gpus = 1
    for index in range(3):
        f.join(index)
    f.settle()
    assert node_of(f, "engine-00000") == 1
    silence(f, 1)
    f.pass_time(f.timing.replace_timeout + f.timing.drain + 5, step=1.0)
    (verdict,) = f.verdicts
    assert verdict.outcome == "drained" and "replace_timeout" in verdict.reason


def test_a_cell_that_never_fitted_ends_the_run_at_once_with_the_numbers(fleet, pool):
    f = fleet(pool("engine", num_cells=2, num_gpus_per_worker=1), nodes=1, gpus=1)
    (verdict,) = f.verdicts
    assert verdict.outcome == "failed" and "node-00000 0 of 1" in verdict.reason


def test_the_place_of_a_trainer_that_waits_for_the_fence_is_kept_for_it(fleet, pool):
    """The driver is lost with an engine's node: while the trainer waits for their fence, the engine finds its GPU."""
    f = gpu_run(fleet, pool)
    trainer, engine = node_of(f, "trainer-00000"), node_of(f, "engine-00001")
    assert node_of(f, "driver-00000") == engine != trainer
    silence(f, engine)
    assert node_of(f, "trainer-00000") == trainer and f.phases()["trainer-00000"] == "ready"
    assert f.phases()["engine-00001"] == "waiting"
