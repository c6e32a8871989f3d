"""An engine that an operator stops is not waited for: weights go to the others, and to it when it is started again."""

import pytest

from miles_hpc.wire.operator import OperatorClient

from ..conftest import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
CELL = "engine-policy-0-00001"


def test_a_run_goes_on_while_an_engine_is_stopped_and_takes_it_back(smoke):
    # Longer than anything here takes: it is cancelled when all was seen.
    run = smoke("steps=500", "inference.fake_token_ms=20", "rollout.session_every=0", "data.heldout=")
    run.reach(1)

    def controller_log():
        return next(run.run_dir.glob("logs/attempt-0/*/controller-00000-00000.*.log")).read_text()

    with OperatorClient(run.run_dir) as hub:
        row = next(row for row in hub.cells() if row.cell == CELL)
        hub.stop_cell(CELL, row.generation, "a look inside")
        wait_for(lambda: run.cell(CELL).state == "stopped", "the engine to be stopped")
        run.reach(run.step() + 3)  # at least two weight windows without it
        assert "begins with 1 engines" in controller_log()
        hub.start_cell(CELL)
        wait_for(lambda: f"{CELL} g1-2: took weights" in controller_log(), "the engine to take the weights")
        windows = controller_log().count("begins with 2 engines")
        wait_for(lambda: controller_log().count("begins with 2 engines") > windows, "a window with both")
        hub.cancel("seen")
    assert run.end(60)["outcome"] == "cancelled"
    assert run.left() == []
