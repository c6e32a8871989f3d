"""What comes into the hub's state machine and what it asks for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from miles_hpc.hub.site import SiteSeen
from miles_hpc.wire.messages import FromHub, Message

Outcome = Literal["finished", "drained", "cancelled", "failed"]
EXIT_CODES: dict[Outcome, int] = {"finished": 0, "failed": 1, "drained": 75, "cancelled": 130}


# ------------------------------------------------------------------------------------------------ events
class Received(msgspec.Struct, frozen=True):
    """A message from a connection whose role may send it; `peer` is its routing id."""

    peer: bytes
    message: Message


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class VerdictWritten(msgspec.Struct, frozen=True):
    """The verdict is durable."""


class HubSignalled(msgspec.Struct, frozen=True):
    """The hub process itself was told to stop by a signal."""

    name: str


class HubBroke(msgspec.Struct, frozen=True):
    """A reaction raised: the state can no longer be trusted, so the run ends."""

    text: str


Event = Received | Tick | VerdictWritten | HubSignalled | HubBroke | SiteSeen


# ----------------------------------------------------------------------------------------------- actions
class Send(msgspec.Struct, frozen=True):
    peer: bytes
    message: FromHub
    kept: bool = False
    """Only when the hub's journal, as it is now, is on disk: the next hub knows of it, too."""


class Note(msgspec.Struct, frozen=True):
    """One line of the hub's log."""

    event: str
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    level: Literal["info", "warning", "error"] = "info"


class WriteVerdict(msgspec.Struct, frozen=True):
    """How the attempt ended; asked for once. `summary` has the schema of summary.json."""

    outcome: Outcome
    reason: str
    exit_code: int
    summary: dict[str, Any]


class ShowEvents(msgspec.Struct, frozen=True):
    """Answer a GetEvents: the log belongs to the shell."""

    peer: bytes
    call_id: str
    since: int
    limit: int


class ShowDump(msgspec.Struct, frozen=True):
    """Answer a GetDump: sockets, threads and files belong to the shell."""

    peer: bytes
    call_id: str


class Leave(msgspec.Struct, frozen=True):
    """Every agent has left, or the time for that is over: the hub may exit."""


Action = Send | Note | WriteVerdict | ShowEvents | ShowDump | Leave
