"""What only a hub knows and the next one should: budgets, counts, the driver's last word, what operators decided.

Written behind its back; only the answer to an operator's order waits until it is on disk.

One file per epoch, `<run_dir>/journal/attempt-<n>.epoch-<e>.json`, so that two hubs never write one. A hub that finds
none, or cannot read it in time, goes on without: all else comes from the config, the agents and the commits.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.hub.actions import Outcome
from miles_hpc.hub.core import NEVER_STARTED, Core, Phase
from miles_hpc.hub.drain import Drain
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import RestartCell, StopCell

READ_PATIENCE_S = 1.0


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Times are wall-clock seconds: they outlive the hub, and only budgets and reports depend on them."""

    started: float
    ready: float | None = None
    first_step: float | None = None
    step: int = 0
    weight_version: int = 0
    driver_summary: dict[str, Any] = {}
    starts: dict[str, int] = {}
    """Cell -> how often it was started."""
    generations: dict[str, Generation] = {}
    """Cell -> its newest generation."""
    deaths: dict[str, list[float]] = {}
    """Cell -> its budgeted deaths inside the window."""
    group_deaths: dict[str, list[float]] = {}
    stopped: list[str] = []
    """Cells that an operator stopped."""
    left: list[str] = []
    """Nodes of the first job that have said goodbye."""
    drain_reason: str = ""
    drain_until: float = 0.0
    drain_requeue: bool = False
    deferred: list[StopCell | RestartCell] = []
    """Orders of operators that wait for the end of a weight window."""
    outcome: Outcome | None = None
    """How the run is to end; decided, and perhaps not yet a verdict on disk."""
    outcome_reason: str = ""


def journal_path(run_dir: Path, attempt: int, epoch: int) -> Path:
    """Where the hub of an epoch writes."""
    return run_dir / "journal" / f"attempt-{attempt}.epoch-{epoch:05d}.json"


def take(core: Core, wall: float) -> Journal:
    """The journal as of now."""

    def at(moment: float) -> float:
        return round(wall - (core.now - moment), 1)

    drain = core.drain
    # A cell that waits since the last hub ended has none of this one's.
    newest = {} if core.recovery is None else dict(core.recovery.newest)
    newest |= {cell.id: cell.generation for cell in core.cells.values() if cell.generation != NEVER_STARTED}
    return Journal(
        started=at(core.started_at),
        ready=None if core.ready_at is None else at(core.ready_at),
        first_step=None if core.first_step_at is None else at(core.first_step_at),
        step=core.step,
        weight_version=core.weight_version,
        driver_summary=core.driver_summary,
        starts={cell.id: cell.starts for cell in core.cells.values() if cell.starts},
        generations=newest,
        deaths={cell.id: [at(death) for death in cell.deaths] for cell in core.cells.values() if cell.deaths},
        group_deaths={group: [at(death) for death in deaths] for group, deaths in core.group_deaths.items()},
        stopped=[cell.id for cell in core.cells.values() if not cell.wanted],
        left=sorted(core.left_of_first_job()),
        drain_reason=drain.reason if drain is not None else "",
        drain_until=at(drain.until) if drain is not None else 0.0,
        drain_requeue=drain is not None and drain.requeue,
        deferred=core.deferred,
        outcome=core.outcome,
        outcome_reason=core.outcome_reason,
    )


def restore(core: Core, journal: Journal, wall: float) -> None:
    """Go on where the last hub was; `core.now` belongs to `wall`."""

    def at(moment: float) -> float:
        # A wall clock that jumped back must not put a death into the future.
        return core.now - max(0.0, wall - moment)

    core.started_at = at(journal.started)
    core.ready_at = None if journal.ready is None else at(journal.ready)
    core.first_step_at = None if journal.first_step is None else at(journal.first_step)
    core.step, core.weight_version = journal.step, journal.weight_version
    core.driver_summary = dict(journal.driver_summary)
    for name, cell in core.cells.items():
        cell.starts = journal.starts.get(name, 0)
        cell.deaths = deque(map(at, journal.deaths.get(name, [])))
        if name in journal.stopped:
            cell.wanted = False
            core.change_phase(cell, Phase.STOPPED)
    if core.recovery is not None:
        for name, generation in journal.generations.items():
            core.recovery.know(name, generation)
    core.left_before = frozenset(journal.left)
    core.group_deaths = {group: deque(map(at, deaths)) for group, deaths in journal.group_deaths.items()}
    if journal.drain_reason:
        left = max(0.0, journal.drain_until - wall)
        core.drain = Drain(journal.drain_reason, core.now + left, journal.drain_requeue)
    core.deferred = list(journal.deferred)
    if journal.outcome is not None:
        core.decide(journal.outcome, journal.outcome_reason)


def read(run_dir: Path, attempt: int, epoch: int) -> Journal | None:
    """The journal of the newest epoch before this one; None when there is none or it is not readable in time."""
    found: list[Journal] = []

    def look() -> None:
        for earlier in range(epoch - 1, 0, -1):
            try:
                content = journal_path(run_dir, attempt, earlier).read_bytes()
                found.append(msgspec.json.decode(content, type=Journal))
            except (OSError, msgspec.MsgspecError):
                continue
            return

    # A daemon: a file system that stalls costs the counts of the last hub, not the run.
    thread = threading.Thread(target=look, name="journal", daemon=True)
    thread.start()
    thread.join(READ_PATIENCE_S)
    return found[0] if found else None
