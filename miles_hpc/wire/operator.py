"""OperatorClient: what the verbs of `miles-hpc` ask a living hub."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, TypeVar

import zmq

from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CancelRun,
    CellRow,
    CellsReply,
    Done,
    DrainRun,
    DumpReply,
    EventsReply,
    Failed,
    GetCells,
    GetDump,
    GetEvents,
    GetStatus,
    Message,
    Refused,
    RestartCell,
    StartCell,
    StatusReply,
    StopCell,
)
from miles_hpc.wire.rendezvous import RendezvousError, newest, newest_attempt, rendezvous_dir
from miles_hpc.wire.security import SecurityError, load_client
from miles_hpc.wire.socket_options import milliseconds
from miles_hpc.wire.sockets import HubError, HubLink, HubRefused, HubUnreachable, connect_hub

R = TypeVar("R", bound=Message)


class HubFailed(HubError):
    """The hub could not do what was asked."""


class OperatorClient:
    """Asks the newest hub of a run; a new connection for the first call, kept until `close`.

    Args:
        attempt: default: the newest that has published a hub.
        timeout_s: for each call, connecting included.

    Raises:
        HubUnreachable: when the run has no hub on record, or its keys are gone.
    """

    def __init__(self, run_dir: Path, attempt: int | None = None, *, timeout_s: float = 5.0) -> None:
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._link: HubLink | None = None
        chosen = newest_attempt(run_dir) if attempt is None else attempt
        if chosen is None:
            raise HubUnreachable(f"no hub was ever published in {run_dir / 'rendezvous'}: has the run started?")
        self.attempt = chosen

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> StatusReply:
        """Nodes, cells and progress. Raises HubError: unreachable, refused, or failed."""
        return self._ask(GetStatus(call_id=_call_id()), StatusReply)

    def cells(self) -> list[CellRow]:
        """All cells. Raises as `status`."""
        return self._ask(GetCells(call_id=_call_id()), CellsReply).cells

    def cancel(self, reason: str = "") -> None:
        """End the run as cancelled; returns when the hub has taken it. Raises as `status`."""
        self._ask(CancelRun(call_id=_call_id(), reason=reason), Done)

    def drain(self, reason: str = "", deadline_s: float = 0.0, *, requeue: bool = False) -> None:
        """Let the run commit and end as drained; returns when the hub has taken it. Raises as `status`.

        Args:
            deadline_s: until everything stops, committed or not; 0: `timing.drain`.
            requeue: go on in a new allocation, where there is a scheduler.
        """
        self._ask(DrainRun(call_id=_call_id(), reason=reason, deadline_s=deadline_s, requeue=requeue), Done)

    def stop_cell(self, cell: str, generation: Generation, reason: str = "") -> None:
        """Stop this generation of a cell until `start_cell`; returns when the hub has taken it. Raises as `status`."""
        self._ask(StopCell(call_id=_call_id(), cell=cell, generation=generation, reason=reason), Done)

    def start_cell(self, cell: str) -> None:
        """A stopped cell is wanted again; returns when the hub has taken it. Raises as `status`."""
        self._ask(StartCell(call_id=_call_id(), cell=cell), Done)

    def restart_cell(self, cell: str, generation: Generation, reason: str = "") -> None:
        """Replace this generation of a cell; returns when the hub has taken it. Raises as `status`."""
        self._ask(RestartCell(call_id=_call_id(), cell=cell, generation=generation, reason=reason), Done)

    def events(self, since: int = 0, limit: int = 1000) -> tuple[list[dict[str, Any]], int]:
        """The hub's newest events, none before number `since`, and the number to go on from. Raises as `status`."""
        reply = self._ask(GetEvents(call_id=_call_id(), since=since, limit=limit), EventsReply)
        return reply.events, reply.next

    def dump(self) -> dict[str, Any]:
        """All that the hub knows. Raises as `status`."""
        return self._ask(GetDump(call_id=_call_id()), DumpReply).content

    def close(self) -> None:
        """Drop the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _ask(self, question: Message, wanted: type[R]) -> R:
        deadline = time.monotonic() + self._timeout_s
        try:
            answer = self._exchange(question, deadline)
        except BaseException:
            self.close()  # an answer that comes late must not meet the next question
            raise
        if isinstance(answer, Failed):
            raise HubFailed(answer.text)
        if isinstance(answer, Refused):
            raise HubRefused(answer.code, answer.text)
        if not isinstance(answer, wanted):
            self.close()
            raise HubFailed(f"the hub answered {type(answer).__name__}, expected {wanted.__name__}")
        return answer

    def _exchange(self, question: Message, deadline: float) -> Message:
        if self._link is None:
            self._link, answer = self._connect(question)
            return answer
        link = self._link
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        poller.register(link.monitor, zmq.POLLIN)
        if not link.send(question):
            return self._reconnect(question)
        while (left := deadline - time.monotonic()) > 0:
            poller.poll(milliseconds(left))
            if any(event.kind != "up" for event in link.events()):
                return self._reconnect(question)
            if answers := link.receive(limit=1):
                return answers[0]
        raise HubUnreachable(f"the hub at {link.endpoint.netloc} did not answer within {self._timeout_s:g} s")

    def _reconnect(self, question: Message) -> Message:
        self.close()
        self._link, answer = self._connect(question)
        return answer

    def _connect(self, question: Message) -> tuple[HubLink, Message]:
        try:
            found = newest(self._run_dir, self.attempt)
            keys = load_client(self._run_dir, self.attempt, "operator")
        except (RendezvousError, SecurityError) as failure:
            raise HubUnreachable(str(failure)) from failure
        if found is None:
            raise HubUnreachable(f"no hub was published in {rendezvous_dir(self._run_dir, self.attempt)}")
        return connect_hub(found, keys, question, timeout_s=self._timeout_s, bulk=True)


def _call_id() -> str:
    return secrets.token_hex(8)
