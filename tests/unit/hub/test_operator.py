"""What operators ask for, against scripted agents."""

from __future__ import annotations

import pytest

from miles_hpc.config.schema import HealConfig
from miles_hpc.hub.actions import Send, ShowDump, ShowEvents
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CellsReply,
    Done,
    DrainRun,
    Failed,
    GetCells,
    GetDump,
    GetEvents,
    HoldCells,
    ReservePorts,
    RestartCell,
    StartCell,
    StartWorker,
    StatusReply,
    StopCell,
    StopWorker,
)

pytestmark = pytest.mark.unit

OPERATOR = b"operator"
G1, G2 = Generation(1, 1), Generation(1, 2)


@pytest.fixture
def run(fleet, pool):
    made = fleet(
        pool("engine", num_cells=2),
        pool("driver", category="driver", restart="fail_run"),
        pool("controller", category="controller", state="stateful"),
    )
    made.clear()
    return made


def ask(run, message):
    """Returns the one answer to the operator; everything else that follows is left in `run.sent`."""
    actions = run.receive(OPERATOR, message)
    (answer,) = [a.message for a in actions if isinstance(a, Send) and a.peer == OPERATOR]
    run.settle()
    return answer


def stop(call_id="s", cell="engine-00000", generation=G1):
    return StopCell(call_id=call_id, cell=cell, generation=generation, reason="too hot")


def test_an_order_is_answered_when_it_is_kept_and_a_refusal_at_once(run):
    def answers(message):
        return [a for a in run.receive(OPERATOR, message) if isinstance(a, Send) and a.peer == OPERATOR]

    for _ in range(2):
        assert answers(stop()) == [Send(OPERATOR, Done(call_id="s"), kept=True)], "asked again, too"
    (refused,) = answers(stop("x", cell="engine-00007"))
    assert isinstance(refused.message, Failed) and not refused.kept
    (shown,) = answers(GetCells(call_id="g"))
    assert not shown.kept


def test_a_stopped_cell_stays_stopped_until_it_is_started(run):
    assert ask(run, stop()) == Done(call_id="s")
    assert [o.worker for o in run.orders(StopWorker)] == ["engine-00000-00000"]
    run.pass_time(60)
    assert run.phases().pop("engine-00000") == "stopped" and list(run.phases().values()).count("ready") == 3
    assert run.orders(ReservePorts) == []
    assert ask(run, StartCell(call_id="t", cell="engine-00000")) == Done(call_id="t")
    assert run.phases()["engine-00000"] == "ready" and run.cell("engine-00000").generation == G2


def test_what_an_operator_has_started_again_was_not_healed(run):
    ask(run, stop())
    ask(run, StartCell(call_id="t", cell="engine-00000"))
    ask(run, RestartCell(call_id="r", cell="engine-00000", generation=G2))
    run.pass_time(1)
    assert run.cell("engine-00000").generation == Generation(1, 3) and run.phases()["engine-00000"] == "ready"
    assert run.core.healed() == 0 and not [note for note in run.notes if note.event == "cell_healing"]
    run.die("engine-00000-00000")
    run.pass_time(5)
    assert run.core.healed() == 1 and len([note for note in run.notes if note.event == "cell_healing"]) == 1


def test_a_stop_of_another_generation_is_refused(run):
    run.die("engine-00000-00000")
    run.pass_time(1)
    answer = ask(run, stop())
    assert isinstance(answer, Failed) and "at generation 1-2 by now, not 1-1" in answer.text
    assert run.phases()["engine-00000"] == "ready"


def test_an_order_with_one_call_id_is_carried_out_once(run):
    restart = RestartCell(call_id="r", cell="engine-00000", generation=G1)
    assert ask(run, restart) == Done(call_id="r")
    run.clear()
    assert ask(run, restart) == Done(call_id="r")
    assert run.orders(StopWorker, StartWorker) == [] and run.cell("engine-00000").generation == G2


def test_a_restart_costs_no_budget(fleet, pool):
    run = fleet(pool("engine"), heal=HealConfig(budget=1))
    for n in range(1, 6):
        assert isinstance(
            ask(run, RestartCell(call_id=f"r{n}", cell="engine-00000", generation=Generation(1, n))), Done
        )
    assert run.phases() == {"engine-00000": "ready"} and run.verdicts == []
    assert run.cell("engine-00000").generation == Generation(1, 6)


def test_a_restart_ends_a_wait_before_the_next_try(fleet, pool):
    run = fleet(pool("engine"), heal=HealConfig(backoff_s=20))
    run.die("engine-00000-00000")
    run.die("engine-00000-00000")
    assert run.phases() == {"engine-00000": "waiting"}
    generation = run.cell("engine-00000").generation
    ask(run, RestartCell(call_id="r", cell="engine-00000", generation=generation))
    assert run.phases() == {"engine-00000": "ready"}


def test_a_cell_that_waits_for_its_next_try_can_be_stopped(fleet, pool):
    run = fleet(pool("engine"), heal=HealConfig(backoff_s=20))
    run.die("engine-00000-00000")
    run.die("engine-00000-00000")
    assert ask(run, stop(generation=run.cell("engine-00000").generation)) == Done(call_id="s")
    run.pass_time(60)
    assert run.phases() == {"engine-00000": "stopped"}


def test_stopping_and_starting_again_before_the_cell_is_gone_starts_the_next_generation(run):
    for agent in run.agents:
        agent.silent = True  # the stop order waits in its connection
    ask(run, stop())
    assert run.phases()["engine-00000"] == "stopping"
    ask(run, StartCell(call_id="t", cell="engine-00000"))
    run.resume(0)
    run.settle()
    assert run.phases()["engine-00000"] == "ready" and run.cell("engine-00000").generation == G2


def test_stopping_twice_and_starting_what_runs_change_nothing(run):
    ask(run, stop())
    run.clear()
    assert ask(run, stop("again")) == Done(call_id="again")
    assert ask(run, StartCell(call_id="t", cell="engine-00001")) == Done(call_id="t")
    assert run.orders(StopWorker, StartWorker) == []


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (stop(cell="driver-00000"), "cannot go on without it"),
        (RestartCell(call_id="s", cell="driver-00000", generation=G1), "cannot go on without it"),
        (stop(cell="controller-00000"), "cannot go on without it"),
        (stop(cell="engine-0000"), "did you mean engine-0000"),
        (stop(cell="x"), "`miles-hpc cells` lists them"),
    ],
)
def test_what_cannot_be_done_is_said(run, order, text):
    answer = ask(run, order)
    assert isinstance(answer, Failed) and text in answer.text and answer.call_id == "s"
    assert run.orders(StopWorker) == []


def test_a_stopped_cell_is_not_restarted(run):
    ask(run, stop())
    answer = ask(run, RestartCell(call_id="r", cell="engine-00000", generation=G1))
    assert isinstance(answer, Failed) and "miles-hpc start engine-00000" in answer.text


def test_nothing_is_started_while_the_run_drains(run):
    ask(run, stop())
    ask(run, DrainRun(call_id="d", reason="maintenance"))
    answer = ask(run, StartCell(call_id="t", cell="engine-00000"))
    assert isinstance(answer, Failed) and "draining (maintenance)" in answer.text


def test_questions_are_answered_and_change_nothing(run):
    before = run.phases()
    cells = ask(run, GetCells(call_id="c"))
    assert isinstance(cells, CellsReply) and {row.cell for row in cells.cells} == set(before)
    actions = run.receive(OPERATOR, GetEvents(call_id="e", since=3, limit=9)) + run.receive(
        OPERATOR, GetDump(call_id="d")
    )
    assert actions == [ShowEvents(OPERATOR, "e", 3, 9), ShowDump(OPERATOR, "d")]
    assert not isinstance(actions, StatusReply) and run.phases() == before


def test_old_answers_are_forgotten(run):
    for n in range(600):
        ask(run, StartCell(call_id=f"t{n}", cell="engine-00001"))
    assert len(run.core.answered) <= 256 and "t599" in run.core.answered


@pytest.fixture
def windowed(fleet, pool):
    """A run whose controller holds engine-00000 for a weight window."""
    made = fleet(pool("engine", num_cells=2), pool("controller"))
    made.controller = made.client("controller-00000-00000")
    made.receive(made.controller, HoldCells(cells={"engine-00000": G1}, seconds=20.0))
    made.clear()
    return made


def test_an_order_to_stop_a_cell_of_a_weight_window_waits_for_its_end(windowed):
    assert ask(windowed, stop()) == Done(call_id="s")
    windowed.pass_time(5)
    assert windowed.orders(StopWorker) == []
    windowed.receive(windowed.controller, HoldCells(cells={}, seconds=0.0))
    windowed.settle()
    assert windowed.phases()["engine-00000"] == "stopped"


def test_other_cells_are_stopped_meanwhile_and_a_hold_ends_by_itself(windowed):
    ask(windowed, stop(call_id="a", cell="engine-00001"))
    assert windowed.phases()["engine-00001"] == "stopped"
    ask(windowed, stop(call_id="b"))
    assert windowed.phases()["engine-00000"] == "ready"
    windowed.pass_time(25)
    assert windowed.phases()["engine-00000"] == "stopped"


def test_an_order_that_waited_for_a_cell_that_went_on_by_itself_is_dropped(windowed):
    ask(windowed, RestartCell(call_id="r", cell="engine-00000", generation=G1))
    windowed.die("engine-00000-00000")
    windowed.pass_time(25)
    assert windowed.phases()["engine-00000"] == "ready" and windowed.cell("engine-00000").generation == G2
