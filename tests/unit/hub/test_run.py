"""Clients, operators, and the one end of a run."""

import msgspec
import pytest

from miles_hpc.hub.actions import HubBroke, HubSignalled, Send, Tick, VerdictWritten
from miles_hpc.hub.state import HubState
from miles_hpc.hub.views import status_object
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CancelRun,
    CellsReply,
    ClientHello,
    ClientWelcome,
    Done,
    FinishRun,
    GetCells,
    GetStatus,
    Goodbye,
    Heartbeat,
    PoolAddrs,
    Progress,
    Shutdown,
    StatusReply,
    Superseded,
)

pytestmark = pytest.mark.unit


def test_a_client_is_welcomed_with_the_address_book_and_told_of_each_change(fleet, pool):
    f = fleet(pool("engine"), pool("driver"))
    peer = f.client("driver-00000-00000")
    welcome, book = [a.message for a in f.sent if isinstance(a, Send) and a.peer == peer]
    assert welcome == ClientWelcome(epoch=1, run_id="r", attempt=0)
    assert book.pools["engine"][0].workers[0]["http"].host == "10.0.0.1" and book.healed == 0
    f.clear()
    f.die("engine-00000-00000")
    books = f.orders(PoolAddrs)
    assert [b.revision for b in books] == sorted({b.revision for b in books})
    assert books[0].pools["engine"] == [] and books[0].revision == book.revision + 1
    last = books[-1]
    assert last.pools["engine"][0].generation == Generation(1, 2) and last.pools["engine"][0].ready and last.healed == 1


def test_an_event_that_changes_no_address_pushes_nothing(fleet, pool):
    f = fleet(pool("engine"), pool("driver"))
    f.client("driver-00000-00000")
    f.clear()
    f.pass_time(30)
    assert f.sent == []


def test_a_client_of_an_old_generation_is_superseded(fleet, pool):
    f = fleet(pool("driver"))
    f.die("driver-00000-00000")
    f.clear()
    f.receive(b"late", ClientHello(worker="driver-00000-00000", generation=Generation(1, 1), pid=1))
    ((answer),) = f.sent
    assert isinstance(answer.message, Superseded) and "1-1" in answer.message.reason


def test_a_connected_client_learns_that_its_cell_ends(fleet, pool):
    f = fleet(pool("executor", num_workers_per_cell=2))
    peer = f.client("executor-00000-00000")
    f.clear()
    f.die("executor-00000-00001")
    assert [a.peer for a in f.sent if isinstance(a, Send) and isinstance(a.message, Superseded)] == [peer]
    f.clear()
    f.receive(peer, Progress(step=99, weight_version=99))
    assert isinstance(f.sent[0].message, Superseded) and f.core.step == 0


def test_finish_makes_one_verdict_then_shutdown_then_leave(fleet, pool):
    f = fleet(pool("driver"), pool("engine"), nodes=2)
    peer = f.client("driver-00000-00000")
    f.now += 4.0
    f.receive(peer, Progress(step=1, weight_version=1))
    f.clear()
    f.receive(peer, FinishRun(outcome="finished", summary={"steps": 7, "reward": {"first": 0.1, "last": 0.9}}))
    f.receive(peer, FinishRun(outcome="failed", reason="too late"))
    (verdict,) = f.verdicts
    assert (verdict.outcome, verdict.exit_code, verdict.reason) == ("finished", 0, "")
    assert verdict.summary["steps"] == 7 and verdict.summary["weight_version"] == 1
    assert verdict.summary["reward"] == {"first": 0.1, "last": 0.9, "best": None}
    assert verdict.summary["cells"] == {"started": 2, "healed": 0}
    assert verdict.summary["seconds"] == {"ready": 0.0, "first_step": 4.0, "total": 4.0}
    assert not f.orders(Shutdown)
    f.apply(VerdictWritten())
    assert f.orders(Shutdown) == [Shutdown(reason="finished", exit_code=0)] * 2
    assert f.leaves == 0
    f.settle()
    assert f.leaves == 1
    f.apply(Tick())
    assert f.leaves == 1 and len(f.verdicts) == 1


def test_a_stalled_file_system_does_not_hold_up_the_shutdown(fleet, pool):
    f = fleet(pool("engine"))
    f.receive(b"op", CancelRun(call_id="1"))
    assert not f.orders(Shutdown)
    f.pass_time(4)
    assert len(f.orders(Shutdown)) == 1


def test_an_agent_that_never_says_goodbye_does_not_hold_the_hub(fleet, pool):
    f = fleet(pool("engine", stop_grace=5.0))
    f.agents[0].silent = True
    f.receive(b"op", CancelRun(call_id="1"))
    f.apply(VerdictWritten())
    f.pass_time(9)
    assert f.leaves == 0
    f.pass_time(2)
    assert f.leaves == 1


def test_an_agent_that_joins_after_the_end_is_sent_away(fleet, pool):
    f = fleet(pool("engine"), nodes=2, join=False)
    f.join(0)
    f.receive(b"op", CancelRun(call_id="1"))
    f.apply(VerdictWritten())
    f.clear()
    f.join(1)
    assert [type(a.message) for a in f.sent if isinstance(a, Send)][:2][-1] is Shutdown


def test_cancel_is_answered_and_ends_the_run_with_130(fleet, pool):
    f = fleet(pool("engine"))
    f.clear()
    f.receive(b"op", CancelRun(call_id="c", reason="enough"))
    (verdict,) = f.verdicts
    assert (verdict.outcome, verdict.exit_code, verdict.reason) == ("cancelled", 130, "enough")
    assert f.orders(Done) == [Done(call_id="c")]


def test_a_goodbye_before_the_verdict_is_written_still_ends_well(fleet, pool):
    f = fleet(pool("engine"))
    f.receive(b"op", CancelRun(call_id="c"))
    f.receive(f.agents[0].peer, Goodbye())
    assert f.leaves == 0
    f.apply(VerdictWritten())
    assert f.leaves == 1 and len(f.verdicts) == 1


def test_status_names_nodes_cells_workers_and_progress(fleet, pool):
    f = fleet(pool("driver"), pool("engine", num_cells=2), nodes=2, hub="10.0.0.1:1 pid 4")
    peer = f.client("driver-00000-00000")
    f.receive(peer, Progress(step=3, weight_version=4, summary={"steps": 3}))
    f.die("engine-00001-00000")
    f.clear()
    f.receive(b"op", GetStatus(call_id="s"))
    f.receive(b"op", GetCells(call_id="t"))
    status, cells = [a.message for a in f.sent]
    assert (
        isinstance(status, StatusReply)
        and isinstance(cells, CellsReply)
        and (status.call_id, cells.call_id) == ("s", "t")
    )
    assert (status.step, status.weight_version, status.summary) == (3, 4, {"steps": 3})
    assert [node.state for node in status.nodes] == ["alive", "alive"]
    assert {row.cell: row.restarts for row in cells.cells} == {"driver-00000": 0, "engine-00000": 0, "engine-00001": 1}
    assert all(row.state == "ready" and row.workers[0].pid and row.workers[0].ports for row in cells.cells)


def test_the_status_file_has_what_the_reply_has_and_when_it_was_written(fleet, pool):
    f = fleet(pool("engine"))
    status = status_object(f.core, written_at=12.5)
    wanted = {
        "seconds",
        "run_id",
        "attempt",
        "epoch",
        "hub",
        "step",
        "weight_version",
        "nodes",
        "cells",
        "age_s",
        "written_at",
    }
    assert wanted <= status.keys() and "call_id" not in status
    written = msgspec.json.decode(msgspec.json.encode(status))
    assert written["cells"][0]["generation"] == [1, 1]


def test_pools_with_one_name_are_refused(fleet, pool):
    with pytest.raises(ValueError, match="two pools are called 'engine'"):
        fleet(pool("engine"), pool("engine"))


def test_a_pool_that_reads_an_unknown_one_is_refused(fleet, pool):
    with pytest.raises(ValueError, match=r"'a' reads \['b'\]"):
        fleet(pool("a", reads=("b",)))


def test_the_state_needs_no_socket_and_no_clock():
    import sys

    module = sys.modules[HubState.__module__]
    assert not {"time", "zmq", "logging", "os"} & vars(module).keys()


def test_a_signal_cancels_the_run_and_a_second_one_ends_the_wait_for_agents(fleet, pool):
    f = fleet(pool("engine"))
    f.agents[0].silent = True
    f.apply(HubSignalled("SIGTERM"))
    (verdict,) = f.verdicts
    assert verdict.outcome == "cancelled" and "SIGTERM" in verdict.reason
    f.apply(VerdictWritten())
    assert f.leaves == 0
    f.apply(HubSignalled("SIGTERM"))
    assert f.leaves == 1 and len(f.verdicts) == 1


def test_a_bug_in_a_reaction_ends_the_run_with_its_text(fleet, pool):
    f = fleet(pool("engine"))
    f.apply(HubBroke("KeyError: 'x'"))
    (verdict,) = f.verdicts
    assert verdict.outcome == "failed" and "KeyError: 'x'" in verdict.reason


def test_an_agent_that_said_goodbye_may_beat_on_and_is_not_answered(fleet, pool):
    f = fleet(pool("engine"), nodes=2)
    f.receive(b"op", CancelRun(call_id="c"))
    f.apply(VerdictWritten())
    f.receive(f.agents[0].peer, Goodbye())
    f.clear()
    f.receive(f.agents[0].peer, Heartbeat(seq=7))
    assert f.sent == []
