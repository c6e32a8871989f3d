"""All deadlines of the control plane in one place, with the order that must hold between them."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines in seconds, each counted on the monotonic clock of the process that waits.

    Raises:
        ValueError: when two values are in the wrong order; the text names both.
    """

    heartbeat: float = 1.0
    """Between two heartbeats of one agent; the hub stretches it for large fleets and says so in the welcome."""
    suspect: float = 3.0
    """Silence after which a node gets no new work."""
    dead: float = 10.0
    """Silence after which a node's stateless cells are replaced."""
    failover_max: float = 27.0
    """Until the last candidate has claimed the hub of a lost node."""
    hub_stall: float = 30.0
    """A hub loop that stands still this long is restarted by its own agent."""
    fence: float = 45.0
    """An agent without a hub kills its stateful groups at this age."""
    hub_grace: float = 120.0
    """An agent without a hub stops everything and exits at this age."""
    anti_entropy: float = 10.0
    """Between two full tables of one agent."""
    join: float = 60.0
    """Until every node of the run has said hello."""
    stop_grace: float = 5.0
    """Between SIGTERM and SIGKILL to a worker's group."""
    trainer_stop_grace: float = 20.0
    """The same for a trainer's group."""
    start_deadline: float = 1800.0
    """Until a started worker's probe must have passed once."""
    probe_interval: float = 2.0
    """Between two probes of a worker."""
    probe_timeout: float = 5.0
    """One probe's answer."""
    status_interval: float = 1.0
    """Between two writes of status.json."""

    def __post_init__(self) -> None:
        order = [
            ("3 x heartbeat", 3 * self.heartbeat, "<=", "suspect", self.suspect),
            ("suspect", self.suspect, "<", "dead", self.dead),
            ("dead", self.dead, "<", "failover_max", self.failover_max),
            ("failover_max", self.failover_max, "<", "hub_stall", self.hub_stall),
            ("hub_stall + 5", self.hub_stall + 5, "<", "fence", self.fence),
            ("fence", self.fence, "<", "hub_grace", self.hub_grace),
        ]
        for left, left_s, relation, right, right_s in order:
            if not (left_s <= right_s if relation == "<=" else left_s < right_s):
                raise ValueError(
                    f"timing.{left} ({left_s:g} s) must be {relation} timing.{right} ({right_s:g} s): "
                    f"raise timing.{right} or lower the other"
                )
