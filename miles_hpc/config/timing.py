"""All deadlines of the control plane in one place, with the order that must hold between them."""

# Annotations are not put off here: msgspec would compile the text of each in every process that reads a config, which
# is a tenth of the start of a hub.

from typing import Annotated

import msgspec
from msgspec import Meta


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines in seconds, each counted on the monotonic clock of the process that waits.

    Raises:
        ValueError: when two values are in the wrong order; the text names both.
    """

    heartbeat: Annotated[
        float,
        Meta(
            gt=0,
            description="Between two heartbeats of one agent; the hub stretches it for large fleets, see its welcome.",
        ),
    ] = 1.0
    suspect: Annotated[float, Meta(gt=0, description="Silence after which a node gets no new work.")] = 3.0
    dead: Annotated[float, Meta(gt=0, description="Silence after which a node's stateless cells are replaced.")] = 10.0
    failover_max: Annotated[
        float, Meta(gt=0, description="Until the last candidate has claimed the hub of a lost node.")
    ] = 27.0
    hub_stall: Annotated[
        float, Meta(gt=0, description="A hub loop that stands still this long is restarted by its own agent.")
    ] = 30.0
    fence: Annotated[float, Meta(gt=0, description="An agent without a hub kills its stateful groups at this age.")] = (
        45.0
    )
    hub_grace: Annotated[
        float, Meta(gt=0, description="An agent without a hub stops everything and exits at this age.")
    ] = 120.0
    anti_entropy: Annotated[float, Meta(gt=0, description="Between two full tables of one agent.")] = 10.0
    join: Annotated[float, Meta(gt=0, description="Until every node of the run has said hello.")] = 60.0
    replace_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="A cell that has lost its place, and without which the run cannot go on, waits this long for "
            "another one; then the run drains, and is queued again where there is a scheduler.",
        ),
    ] = 120.0
    stop_grace: Annotated[float, Meta(gt=0, description="Between SIGTERM and SIGKILL to a worker's group.")] = 5.0
    trainer_stop_grace: Annotated[float, Meta(gt=0, description="The same for a trainer's group.")] = 20.0
    drain: Annotated[
        float,
        Meta(
            gt=0,
            description="From a request to drain until everything stops, committed or not, when the request names no "
            "time. When Slurm has begun to end the job, its KillWait less the stop is the limit.",
        ),
    ] = 20.0
    start_deadline: Annotated[
        float, Meta(gt=0, description="Until a started worker's probe must have passed once.")
    ] = 1800.0
    probe_interval: Annotated[float, Meta(gt=0, description="Between two probes of a worker.")] = 2.0
    probe_timeout: Annotated[float, Meta(gt=0, description="One probe's answer.")] = 5.0
    stall: Annotated[
        float, Meta(gt=0, description="A server of ours whose loop stands still this long is started again.")
    ] = 60.0
    status_interval: Annotated[float, Meta(gt=0, description="Between two writes of status.json.")] = 1.0

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
