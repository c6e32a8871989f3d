"""The run ends early but in order: no new work, the driver commits the step that it is in, then everything stops."""

from __future__ import annotations

from dataclasses import dataclass

from miles_hpc.hub.core import Core, Phase
from miles_hpc.wire.messages import Draining

UNCOMMITTED = "stopped on the last commit, the steps after it will be done again"


@dataclass(frozen=True)
class Drain:
    """`until` is on the hub's monotonic clock."""

    reason: str
    until: float


def begin(core: Core, reason: str, deadline_s: float, by: str) -> None:
    """The first request counts: its deadline is what the scheduler leaves us."""
    if core.outcome is not None or core.drain is not None:
        return
    seconds = deadline_s if deadline_s > 0 else core.timing.drain
    core.drain = Drain(reason or "no reason given", core.now + seconds)
    core.note("drain", "warning", reason=core.drain.reason, by=by, deadline_s=seconds)
    for peer in core.clients:
        tell(core, peer)


def tell(core: Core, peer: bytes) -> None:
    """Tell a client, also one that says hello while the run drains."""
    if core.drain is not None:
        left = max(0.0, core.drain.until - core.now)
        core.send(peer, Draining(reason=core.drain.reason, deadline_s=left))


def watch(core: Core) -> None:
    """End the run when nobody can commit any more, or the time is over."""
    if core.drain is None or core.outcome is not None:
        return
    if not _driver_may_commit(core):
        core.decide("drained", f"{core.drain.reason}; no driver runs: {UNCOMMITTED}")
    elif core.now >= core.drain.until:
        core.decide("drained", f"{core.drain.reason}; the driver did not commit in time: {UNCOMMITTED}")


def _driver_may_commit(core: Core) -> bool:
    return any(
        cell.spec.category == "driver" and cell.phase in (Phase.STARTING, Phase.READY) for cell in core.cells.values()
    )
