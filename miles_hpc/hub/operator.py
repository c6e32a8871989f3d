"""What operators ask for: a look at the run, its end, and one cell stopped, started or started anew.

A question with a call id is carried out once: the client that lost its connection asks again with the same id and gets
the answer of the first time. An order is answered when the hub's journal, which knows of it, is on disk.
"""

from __future__ import annotations

import difflib

from miles_hpc.hub import drain, lifecycle, views
from miles_hpc.hub.actions import ShowDump, ShowEvents
from miles_hpc.hub.core import Cell, Core, Phase
from miles_hpc.hub.healing import Ending, vital
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CancelRun,
    CellsReply,
    Done,
    DrainRun,
    Failed,
    FromOperator,
    GetCells,
    GetDump,
    GetEvents,
    GetStatus,
    HoldCells,
    RestartCell,
    StartCell,
    StopCell,
)

ANSWERS_KEPT = 256


class _Refusal(Exception):
    """The order cannot be carried out; the text goes to the operator."""


def on_operator(core: Core, peer: bytes, message: FromOperator) -> None:
    """Answer a question, or carry out an order and answer it."""
    match message:
        case GetStatus():
            core.send(peer, views.status_reply(core, message.call_id))
        case GetCells():
            core.send(peer, CellsReply(call_id=message.call_id, cells=views.cell_rows(core)))
        case GetEvents():
            core.out.append(ShowEvents(peer, message.call_id, message.since, message.limit))
        case GetDump():
            core.out.append(ShowDump(peer, message.call_id))
        case _:
            answer = core.answered.get(message.call_id)
            if answer is None:
                answer = core.answered[message.call_id] = _carry_out(core, message)
                if len(core.answered) > ANSWERS_KEPT:
                    del core.answered[next(iter(core.answered))]
            # A decision that this hub alone knows would be undone by its death.
            core.send(peer, answer, kept=isinstance(answer, Done) and not core.cleans_up)


def _carry_out(core: Core, order: CancelRun | DrainRun | StopCell | StartCell | RestartCell) -> Done | Failed:
    try:
        if not core.standing.acts and core.outcome is None:
            # What it did now would be lost, or done twice, when another hub acts: no "done" for that.
            raise _Refusal("this hub hears too few nodes to act, another may take over: ask again in a minute")
        match order:
            case CancelRun():
                core.decide("cancelled", order.reason or "cancelled by an operator")
            case DrainRun():
                drain.begin(
                    core,
                    order.reason or "drained by an operator",
                    order.deadline_s,
                    "operator",
                    requeue=order.requeue,
                )
            case StopCell() | RestartCell() if _is_held(core, order.cell, order.generation):
                core.note("order_waits_for_window", cell=order.cell, generation=str(order.generation))
                core.deferred.append(order)
            case StopCell():
                _stop(core, _cell(core, order.cell, order.generation), order.reason)
            case StartCell():
                _start(core, _cell(core, order.cell))
            case RestartCell():
                _restart(core, _cell(core, order.cell, order.generation), order.reason)
    except _Refusal as refusal:
        return Failed(call_id=order.call_id, text=str(refusal))
    return Done(call_id=order.call_id)


def on_hold(core: Core, hold: HoldCells) -> None:
    """The controller's weight window: the hold replaces the one before."""
    core.held = {cell: (generation, core.now + hold.seconds) for cell, generation in hold.cells.items() if hold.seconds}
    carry_out_deferred(core)


def carry_out_deferred(core: Core) -> None:
    """Orders whose hold is over; one that does not fit any more is dropped, the cell went on by itself."""
    if core.recovering is not None or not core.standing.acts:
        return  # what runs in which generation is not known yet, or it is not for this hub to change it
    waiting = core.deferred
    core.deferred = [order for order in waiting if _is_held(core, order.cell, order.generation)]
    for order in waiting:
        if order in core.deferred:
            continue
        answer = _carry_out(core, order)
        if isinstance(answer, Failed):
            core.note("order_dropped", cell=order.cell, reason=answer.text)


def _is_held(core: Core, cell: str, generation: Generation) -> bool:
    held, until = core.held.get(cell, (None, 0.0))
    return held == generation and core.now < until


def _cell(core: Core, name: str, generation: Generation | None = None) -> Cell:
    """The cell that an order means.

    Raises:
        _Refusal: when there is none, it went on to another generation, or the run is ending anyway.
    """
    cell = core.cells.get(name)
    if cell is None:
        close = difflib.get_close_matches(name, core.cells, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; `miles-hpc cells` lists them"
        raise _Refusal(f"{name}: this run has no such cell{hint}")
    if core.outcome is not None:
        raise _Refusal(f"{name}: the run is ending ({core.outcome}), its cells stop anyway")
    if core.drain is not None:
        raise _Refusal(f"{name}: the run is draining ({core.drain.reason}), its cells stop anyway")
    if generation is not None and cell.generation != generation:
        raise _Refusal(f"{name} is at generation {cell.generation} by now, not {generation}: look again")
    return cell


def _vital(cell: Cell) -> _Refusal:
    return _Refusal(
        f"{cell.id}: the run cannot go on without it; `miles-hpc drain` ends the run with a commit, "
        "and `miles-hpc run --run-dir RUN_DIR --resume` goes on from it"
    )


def _stop(core: Core, cell: Cell, reason: str) -> None:
    if vital(cell) or cell.spec.category == "controller":
        raise _vital(cell)  # without a controller, too, training stands still
    if not cell.wanted:
        return
    core.note("operator_stops_cell", cell=cell.id, generation=str(cell.generation), reason=reason)
    if cell.phase is Phase.WAITING:
        cell.wanted = False
        core.change_phase(cell, Phase.STOPPED)
    elif cell.phase is Phase.STOPPING:
        cell.wanted = False
    else:
        lifecycle.end_cell(core, cell, Ending(_by_operator("stopped", reason), budgeted=False, final=True))


def _start(core: Core, cell: Cell) -> None:
    if cell.wanted:
        return
    core.note("operator_starts_cell", cell=cell.id)
    cell.wanted = cell.ordered = True
    cell.deaths.clear()
    cell.retry_at, cell.unplaced_since = core.earliest_start(cell), None
    if cell.phase is Phase.STOPPED:
        core.change_phase(cell, Phase.WAITING)


def _restart(core: Core, cell: Cell, reason: str) -> None:
    if cell.spec.restart == "fail_run":
        raise _vital(cell)
    if not cell.wanted:
        raise _Refusal(f"{cell.id} is stopped: `miles-hpc start {cell.id}` starts it")
    core.note("operator_restarts_cell", cell=cell.id, generation=str(cell.generation), reason=reason)
    cell.retry_at, cell.ordered = core.earliest_start(cell), True
    lifecycle.end_cell(core, cell, Ending(_by_operator("restarted", reason), budgeted=False))


def _by_operator(what: str, reason: str) -> str:
    return f"{what} by an operator: {reason}" if reason else f"{what} by an operator"
