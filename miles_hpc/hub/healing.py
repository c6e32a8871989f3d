"""What the end of a cell means: started again within a budget, alone or with its whole group, or the end of the run."""

from __future__ import annotations

from collections import deque

import msgspec

from miles_hpc.hub.actions import Outcome
from miles_hpc.hub.core import FENCE_SLACK_S, Cell, Core, Failure, Phase
from miles_hpc.hub.drain import UNCOMMITTED
from miles_hpc.wire.messages import FinishRun

FAILURE_PATIENCE_S = 1.5
"""A driver often sees the death of a part before the hub hears of it: a failure that it reports stands only when no
such death explains it within this time."""


class Ending(msgspec.Struct, frozen=True):
    """Why a cell ends."""

    text: str
    """For people: which worker, how it ended, which log tells more."""
    budgeted: bool = True
    """Counts against the heal budget; a lost node is not the cell's fault."""
    final: bool = False
    """The cell is not wanted any more."""
    outcome: Outcome = "failed"
    """How the run ends when it cannot go on without the cell."""
    follows: bool = False
    """It ends because another cell of its group does, which was judged."""
    relaunch: bool = False
    """It never worked, through no fault of its own: started again whatever its policy."""


def group_of(core: Core, cell: Cell) -> list[Cell]:
    """The cells that end and start together with this one, itself included."""
    group = cell.spec.group
    return [cell] if not group else [other for other in core.cells.values() if other.spec.group == group]


def vital(cell: Cell) -> bool:
    """Whether the run stands still without this very cell."""
    return cell.spec.restart == "fail_run" or bool(cell.spec.group)


def judge(core: Core, cell: Cell, ending: Ending) -> list[Cell]:
    """Decide about the next start of a cell that ends, or about the run. Returns the cells that must end with it."""
    if core.drain is not None:
        if vital(cell):
            core.decide("drained", f"{core.drain.reason}; {ending.text}: {UNCOMMITTED}")
        return []
    if cell.spec.restart == "fail_run" and not ending.relaunch:
        what = "ended before it had finished the run" if cell.spec.category == "driver" else "ended"
        core.decide(ending.outcome, f"cell {cell.id} {what}, and the run cannot go on without it: {ending.text}")
        return []
    if ending.outcome == "cancelled" and cell.spec.group:
        core.decide("cancelled", f"cell {cell.id} ended: {ending.text}")
        return []
    if core.failure is not None and cell.spec.group:
        if core.failure.cell == cell.id:
            return []  # the end of the driver that reported the failure
        core.note("failure_explained", "warning", reason=core.failure.reason, by=ending.text)
        core.failure = None
    members = group_of(core, cell)
    retry_at = core.now
    if ending.budgeted:
        for name in {worker.node for worker in cell.workers if worker.ended or worker.gone}:
            _blame(core, name, cell)
        if cell.spec.group:
            deaths, name = core.group_deaths.setdefault(cell.spec.group, deque()), f"group {cell.spec.group}"
        else:
            deaths, name = cell.deaths, f"cell {cell.id}"
        backoff = _spend(core, deaths, name, ending)
        if backoff is None:
            return []
        retry_at += backoff
    for member in members:
        member.retry_at = max(retry_at, core.earliest_start(member))
    return [member for member in members if member is not cell]


def _blame(core: Core, name: str, cell: Cell) -> None:
    """Count a death against the node where it happened; a node that eats cells gets no new work."""
    node, limit = core.nodes.get(name), core.heal.quarantine
    if node is None or not limit:
        return
    node.deaths.append((core.now, cell.id))
    if not node.quarantined and len(node.deaths) >= limit and len({victim for _, victim in node.deaths}) > 1:
        node.quarantined = True
        core.note("node_quarantined", "error", node=node.id, host=node.host, deaths=len(node.deaths))


def watch_quarantine(core: Core) -> None:
    """Forget deaths that are older than the window; a node with few left gets work again."""
    for node in core.nodes.values():
        while node.deaths and core.now - node.deaths[0][0] > core.heal.window_s:
            del node.deaths[0]
        if node.quarantined and len(node.deaths) < core.heal.quarantine:
            node.quarantined = False
            core.note("node_released", node=node.id)


def _spend(core: Core, deaths: deque[float], name: str, ending: Ending) -> float | None:
    """Count a death. Returns how long the next start waits; None when the budget is spent, which ends the run."""
    heal = core.heal
    while deaths and core.now - deaths[0] > heal.window_s:
        deaths.popleft()
    if len(deaths) >= heal.budget:
        core.decide(
            "failed",
            f"{name} ended {len(deaths) + 1} times within {heal.window_s:g} s, "
            f"its budget is {heal.budget} restarts (heal.budget): {ending.text}",
        )
        return None
    backoff = min(heal.max_backoff_s, heal.backoff_s * 2.0 ** (len(deaths) - 1)) if deaths else 0.0
    deaths.append(core.now)
    return backoff


def may_start(core: Core, cell: Cell) -> bool:
    """A group starts when all of it is gone, and no failure waits for its explanation. A stateful cell also waits for
    the confirmed end of its strays, on whatever node: a second copy must not run beside the first.
    """
    members = group_of(core, cell)
    if cell.spec.group and (core.failure is not None or any(member.phase is Phase.STOPPING for member in members)):
        return False
    stateful = {member.id for member in members if member.spec.state == "stateful"}
    return not (stateful and _may_still_run(core, stateful))


def _may_still_run(core: Core, cells: set[str]) -> bool:
    """Whether a stray of these cells is neither confirmed gone nor fenced."""
    patience = core.timing.fence + FENCE_SLACK_S
    for node in core.nodes.values():
        if not node.strays or node.left or node.down:
            continue
        fenced = node.condition == "dead" and core.now - node.last_heard > patience
        if not fenced and any(stray.rpartition("-")[0] in cells for stray in node.strays):
            return True
    return False


def on_finish(core: Core, cell_id: str, message: FinishRun) -> None:
    """The driver says how the run ended."""
    cell = core.cells[cell_id]
    if message.outcome == "failed" and cell.spec.group and core.drain is None and core.outcome is None:
        if core.failure is None:
            core.failure = Failure(message.reason, cell.id, core.now + FAILURE_PATIENCE_S)
        return
    core.decide(message.outcome, message.reason)


def watch_failure(core: Core) -> None:
    """A failure that nothing has explained ends the run."""
    if core.failure is not None and core.now >= core.failure.until:
        core.decide("failed", core.failure.reason)
