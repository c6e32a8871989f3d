"""What comes into the hub's state machine and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from miles_hpc.hub.site import SiteSeen
from miles_hpc.wire.messages import FromHub, Message

Outcome = Literal["finished", "drained", "cancelled", "failed"]
EXIT_CODES: dict[Outcome, int] = {"finished": 0, "failed": 1, "drained": 75, "cancelled": 130}


# ------------------------------------------------------------------------------------------------ events
@dataclass(frozen=True)
class Received:
    """A message from a connection whose role may send it; `peer` is its routing id."""

    peer: bytes
    message: Message


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class VerdictWritten:
    """The verdict is durable."""


@dataclass(frozen=True)
class HubSignalled:
    """The hub process itself was told to stop by a signal."""

    name: str


@dataclass(frozen=True)
class HubBroke:
    """A reaction raised: the state can no longer be trusted, so the run ends."""

    text: str


Event = Received | Tick | VerdictWritten | HubSignalled | HubBroke | SiteSeen


# ----------------------------------------------------------------------------------------------- actions
@dataclass(frozen=True)
class Send:
    peer: bytes
    message: FromHub
    kept: bool = False
    """Only when the hub's journal, as it is now, is on disk: the next hub knows of it, too."""


@dataclass(frozen=True)
class Note:
    """One line of the hub's log."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    level: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True)
class WriteVerdict:
    """How the attempt ended; asked for once. `summary` has the schema of summary.json."""

    outcome: Outcome
    reason: str
    exit_code: int
    summary: dict[str, Any]


@dataclass(frozen=True)
class ShowEvents:
    """Answer a GetEvents: the log belongs to the shell."""

    peer: bytes
    call_id: str
    since: int
    limit: int


@dataclass(frozen=True)
class ShowDump:
    """Answer a GetDump: sockets, threads and files belong to the shell."""

    peer: bytes
    call_id: str


@dataclass(frozen=True)
class Leave:
    """Every agent has left, or the time for that is over: the hub may exit."""


Action = Send | Note | WriteVerdict | ShowEvents | ShowDump | Leave
