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
    requeue: bool
    """The run is to go on in another allocation, where the site offers one."""


def begin(core: Core, reason: str, deadline_s: float, by: str, *, requeue: bool = True) -> None:
    """The first request counts: its deadline is what the scheduler leaves us."""
    if core.outcome is not None or core.drain is not None:
        return
    seconds = deadline_s if deadline_s > 0 else core.timing.drain
    core.drain = Drain(reason or "no reason given", core.now + seconds, requeue)
    core.note("drain", "warning", reason=core.drain.reason, by=by, deadline_s=seconds)
    for peer in core.clients:
        tell(core, peer)


def on_time_left(core: Core, seconds_left: float) -> None:
    """The hub's own walltime clock: the scheduler's signal may come late, or never."""
    margin = core.info.drain_margin_s
    if seconds_left < margin:
        # Stopping takes its time too, and Slurm looks at its clock only now and then.
        begin(core, f"the allocation ends in {seconds_left:.0f} s", max(1.0, seconds_left * 0.75), "walltime")


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
