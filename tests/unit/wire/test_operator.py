"""OperatorClient against a scripted hub."""

from __future__ import annotations

import time

import pytest

from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CancelRun,
    CellRow,
    CellsReply,
    Done,
    DumpReply,
    EventsReply,
    Failed,
    GetCells,
    GetDump,
    GetEvents,
    GetStatus,
    Refused,
    RestartCell,
    StartCell,
    StatusReply,
    StopCell,
    WorkerRow,
)
from miles_hpc.wire.operator import HubFailed, OperatorClient
from miles_hpc.wire.rendezvous import Rendezvous, publish
from miles_hpc.wire.security import KeyPair, secrets_dir
from miles_hpc.wire.sockets import HubRefused, HubUnreachable

pytestmark = pytest.mark.unit

CELL = CellRow(
    cell="engine-00000",
    pool="engine",
    node="node-00000",
    generation=Generation(1, 1),
    state="ready",
    workers=[WorkerRow(pid=9, ports={"http": 20001})],
    restarts=0,
)


def status(call_id, epoch=1):
    return StatusReply(
        call_id=call_id,
        run_id="r1",
        attempt=1,
        epoch=epoch,
        hub="127.0.0.1:1",
        step=3,
        weight_version=4,
        nodes=[],
        cells=[CELL],
        age_s=1.5,
    )


def answers(epoch=1):
    def react(message):
        if isinstance(message, GetStatus):
            return [status(message.call_id, epoch)]
        if isinstance(message, GetCells):
            return [CellsReply(call_id=message.call_id, cells=[CELL])]
        return [Done(call_id=message.call_id)]

    return react


def test_status_cells_and_cancel_are_answered(start_hub, run_dir):
    hub = start_hub(react=answers())
    with OperatorClient(run_dir, timeout_s=20) as operator:
        assert operator.attempt == 1
        assert operator.status().step == 3
        assert operator.cells() == [CELL]
        operator.cancel("enough")
    (cancel,) = hub.wait_for(CancelRun)
    assert (cancel.role, cancel.message.reason) == ("operator", "enough")


def test_orders_for_cells_and_questions_about_the_hub_are_answered(start_hub, run_dir):
    def react(message):
        if isinstance(message, GetEvents):
            return [EventsReply(call_id=message.call_id, events=[{"event": "x"}], next=message.since + 1)]
        if isinstance(message, GetDump):
            return [DumpReply(call_id=message.call_id, content={"begun": True})]
        return [Done(call_id=message.call_id)]

    hub = start_hub(react=react)
    with OperatorClient(run_dir, timeout_s=20) as operator:
        operator.stop_cell("a-00000", Generation(1, 2), "why")
        operator.start_cell("a-00000")
        operator.restart_cell("a-00000", Generation(1, 3))
        assert operator.events(since=6, limit=5) == ([{"event": "x"}], 7)
        assert operator.dump() == {"begun": True}
    (stop,), (start,), (restart,) = (hub.wait_for(kind) for kind in (StopCell, StartCell, RestartCell))
    assert (stop.message.cell, stop.message.generation, stop.message.reason) == ("a-00000", Generation(1, 2), "why")
    assert start.message.cell == "a-00000" and restart.message.generation == Generation(1, 3)


def test_a_failed_call_carries_the_hub_s_text(start_hub, run_dir):
    start_hub(react=lambda message: [Failed(call_id=message.call_id, text="the run is over")])
    with OperatorClient(run_dir, timeout_s=20) as operator, pytest.raises(HubFailed, match="the run is over"):
        operator.cancel()


def test_a_refusal_carries_its_code(start_hub, run_dir):
    start_hub(react=lambda message: [Refused(code="role", text="not you")])
    with OperatorClient(run_dir, timeout_s=20) as operator, pytest.raises(HubRefused, match=r"\(role\): not you"):
        operator.status()


def test_a_hub_of_a_higher_epoch_is_found_by_the_same_client(start_hub, run_dir):
    first = start_hub(1, react=answers(1))
    with OperatorClient(run_dir, timeout_s=20) as operator:
        assert operator.status().epoch == 1
        first.close()
        start_hub(2, react=answers(2))
        assert operator.status().epoch == 2


def test_a_run_that_never_had_a_hub_is_unreachable(tmp_path):
    with pytest.raises(HubUnreachable, match="no hub was ever published"):
        OperatorClient(tmp_path)


def test_an_attempt_that_never_had_a_hub_is_unreachable(start_hub, run_dir):
    start_hub(react=answers())
    with OperatorClient(run_dir, attempt=7) as operator, pytest.raises(HubUnreachable):
        operator.status()


def test_a_dead_hub_is_unreachable_within_the_deadline(run_dir):
    publish(
        run_dir,
        Rendezvous(
            run_id="r1", attempt=1, epoch=1, addresses=["127.0.0.1"], port=1, public_key=KeyPair.generate().public
        ),
    )
    started = time.monotonic()
    with OperatorClient(run_dir, timeout_s=0.3) as operator, pytest.raises(HubUnreachable, match="no answer from"):
        operator.status()
    assert time.monotonic() - started < 3


def test_a_hub_that_goes_silent_is_unreachable_and_a_late_answer_meets_no_other_question(start_hub, run_dir):
    late = []

    def react(message):
        if isinstance(message, GetStatus):
            late.append(message)
            return [] if len(late) == 2 else [status(message.call_id)]
        return [CellsReply(call_id=message.call_id, cells=[])]

    start_hub(react=react)
    with OperatorClient(run_dir, timeout_s=0.5) as operator:
        operator.status()
        with pytest.raises(HubUnreachable, match="did not answer"):
            operator.status()
    with OperatorClient(run_dir, timeout_s=20) as operator:
        assert operator.cells() == []


def test_a_run_directory_without_the_operator_s_key_is_named(start_hub, run_dir):
    start_hub(react=answers())
    (secrets_dir(run_dir, 1) / "operator.json").unlink()
    with OperatorClient(run_dir) as operator, pytest.raises(HubUnreachable, match=r"operator\.json"):
        operator.status()
