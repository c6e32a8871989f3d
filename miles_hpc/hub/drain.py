"""The run ends early but in order: no new work, the driver commits the step that it is in, then everything stops."""

from __future__ import annotations

import msgspec

from miles_hpc.hub.core import Core, Phase
from miles_hpc.wire.messages import Draining

UNCOMMITTED = "stopped on the last commit, the steps after it will be done again"

KILL_SLACK_S = 5.0
"""For the verdict, its way to the agents, and what `timing.stop_grace` does not cover."""


class Drain(msgspec.Struct, frozen=True):
    """`until` is on the hub's monotonic clock."""

    reason: str
    until: float
    requeue: bool
    """The run is to go on in another allocation, where the site offers one."""


def begin(core: Core, reason: str, deadline_s: float, by: str, *, requeue: bool = True, ending: bool = False) -> None:
    """The first request counts; one that is `ending`, which the scheduler's SIGKILL follows, may leave less time."""
    if core.outcome is not None:
        return
    seconds = deadline_s if deadline_s > 0 else core.timing.drain
    if ending and core.kill_wait is not None:
        seconds = min(seconds, before_the_kill(core.kill_wait, core.timing.stop_grace))
    if core.drain is not None:
        if ending and core.now + seconds < core.drain.until:
            core.drain = msgspec.structs.replace(core.drain, until=core.now + seconds)
            core.note("drain_hurried", "warning", reason=reason, by=by, deadline_s=seconds)
            for peer in core.clients:
                tell(core, peer)
        return
    core.drain = Drain(reason or "no reason given", core.now + seconds, requeue)
    core.note("drain", "warning", reason=core.drain.reason, by=by, deadline_s=seconds)
    for peer in core.clients:
        tell(core, peer)


def before_the_kill(kill_wait: float, stop_grace: float) -> float:
    """Seconds for the commit between the scheduler's SIGTERM and its SIGKILL, stopping everything in between too."""
    return max(kill_wait / 2, kill_wait - stop_grace - KILL_SLACK_S)


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
