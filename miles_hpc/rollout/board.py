"""Which worker holds which group: a pure state machine. Events in, actions out; no sockets, no clock of its own.

A group is pending, leased to one worker, or received (the worker keeps it until it is freed). A lease ends by the first
complete result from anyone, by a failure that its holder reports, or with its worker: then the group is pending again,
before all others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from miles_hpc.rollout.accounts import Accounts
from miles_hpc.wire.ids import Generation

Peer: TypeAlias = bytes
FreeReason = Literal["committed", "duplicate", "superseded", "dropped"]


@dataclass(frozen=True)
class Run:
    """Send a group to a worker."""

    peer: Peer
    group: str


@dataclass(frozen=True)
class Free:
    """A worker need not run or keep these groups any longer."""

    peer: Peer
    groups: tuple[str, ...]
    reason: FreeReason


Action: TypeAlias = Run | Free
Ending: TypeAlias = Literal["committed", "returned", "superseded", "done", "dropped"]


@dataclass
class Seat:
    """One connected worker process."""

    peer: Peer
    worker: str
    generation: Generation
    credits: int
    """Groups that it may hold leases of."""
    heard: float
    leases: set[str] = field(default_factory=set)
    keeps: set[str] = field(default_factory=set)
    """Received groups that it still holds for replay."""
    silent: bool = False


@dataclass
class _Group:
    counted: bool
    again: bool = False
    state: Literal["pending", "leased", "received"] = "pending"
    holder: Peer | None = None
    lost_by: set[str] = field(default_factory=set)
    """Workers whose lease ended without a word; one of them may still deliver."""


class Board:
    """Groups and workers of one training incarnation.

    Args:
        lease_s: silence after which a worker's groups are dispatched again.
        accounts: counts are kept here; they outlive the incarnation.
    """

    def __init__(self, lease_s: float, accounts: Accounts) -> None:
        self._lease_s = lease_s
        self.accounts = accounts
        self.seats: dict[Peer, Seat] = {}
        self._groups: dict[str, _Group] = {}
        self._pending: deque[str] = deque()
        self._adopting_until: float | None = None
        self._claims: dict[str, Peer] = {}

    def adopt(self, until: float) -> None:
        """A new executor in a living incarnation: until then workers say what they hold, and nothing is dispatched to
        others; whoever holds a group gets it, now or when it is added."""
        self._adopting_until = until

    # ------------------------------------------------------------------------------------------ work
    def add(self, groups: Iterable[str], *, counted: bool = True, again: bool = False) -> list[Action]:
        """New groups.

        Args:
            counted: off for evaluation, which the accounts never see and which goes before all else.
            again: a lost executor had received them; those that nobody still holds are counted as `regenerate`.
        """
        names = list(groups)
        for name in names:
            self._groups[name] = _Group(counted, again=again)
        if counted:
            self._pending.extend(names)
        else:
            self._pending.extendleft(reversed(names))
        claimed = [(name, self._claims.pop(name)) for name in names if name in self._claims]
        actions = [self._to_holder(name, peer) for name, peer in claimed if peer in self.seats]
        return [*actions, *self._pump()]

    def _to_holder(self, name: str, peer: Peer) -> Action:
        """Lease a pending group to the worker that runs or keeps it; told to run it, it only sends what it has."""
        self._pending.remove(name)
        group, seat = self._groups[name], self.seats[peer]
        group.state, group.holder = "leased", peer
        seat.leases.add(name)
        self._count_dispatch(group)
        return Run(peer, name)

    def settle(self, groups: Collection[str], how: Ending, reason_dropped: str = "") -> list[Action]:
        """Groups whose story ends: forget them, count the open ones, free them at the workers. Unknown ids are ignored.

        `done` is for groups that are not counted, `dropped` for received ones that are refused, with the reason.
        """
        reason: FreeReason = "committed" if how == "committed" else "superseded"
        freed: dict[Peer, list[str]] = {}
        for name in groups:
            group = self._groups.pop(name, None)
            if group is None:
                continue
            if group.state == "pending":
                self._pending.remove(name)
            elif group.counted:
                self._close(how, reason_dropped)
            if group.holder is not None:
                freed.setdefault(group.holder, []).append(name)
                seat = self.seats[group.holder]
                seat.leases.discard(name)
                seat.keeps.discard(name)
        return [*(Free(peer, tuple(names), reason) for peer, names in freed.items()), *self._pump()]

    def _close(self, how: Ending, reason: str) -> None:
        if how == "committed":
            self.accounts.committed += 1
        elif how == "returned":
            self.accounts.returned += 1
        else:
            self.accounts.drop(reason if how == "dropped" else "superseded")

    # ------------------------------------------------------------------------------------------ results
    def on_done(self, peer: Peer, names: Sequence[str], now: float) -> tuple[list[str], list[Action]]:
        """Complete groups came. Returns those that are the first ones, and must be used.

        The first complete one wins, also from a worker whose lease had ended: then that lease was not lost after all.
        """
        seat = self.seats.get(peer)
        if seat is None:
            return [], []
        seat.heard = now
        first: list[str] = []
        freed: dict[tuple[Peer, FreeReason], list[str]] = {}
        for name in names:
            group = self._groups.get(name)
            if group is not None and group.state == "leased" and group.holder == peer:
                seat.leases.discard(name)
            elif group is None and self._adopting_until is not None:
                self._claims[name] = peer  # asked for again once somebody wants it
                continue
            elif group is None or group.state == "received":
                # A repeat by the worker that keeps it is its lost acknowledgement, not a second result.
                if group is None or group.holder != peer:
                    freed.setdefault((peer, "superseded" if group is None else "duplicate"), []).append(name)
                continue
            else:
                self._on_unleased(seat, name, group, freed)
            group.state, group.holder = "received", peer
            seat.keeps.add(name)
            first.append(name)
        actions = [Free(owner, tuple(groups), reason) for (owner, reason), groups in freed.items()]
        return first, [*actions, *self._pump()]

    def _on_unleased(
        self, seat: Seat, name: str, group: _Group, freed: dict[tuple[Peer, FreeReason], list[str]]
    ) -> None:
        """A complete group of a worker that has no lease of it, while nobody else has finished it."""
        if seat.worker in group.lost_by:
            group.lost_by.discard(seat.worker)
            self._count_drop(group, "lost", -1)
        else:
            self._count_dispatch(group)
        if group.state == "pending":
            self._pending.remove(name)
        elif group.holder is not None:
            self.seats[group.holder].leases.discard(name)
            self._count_drop(group, "duplicate")
            freed.setdefault((group.holder, "duplicate"), []).append(name)

    def on_failed(self, peer: Peer, name: str, reason: str, now: float) -> tuple[bool, list[Action]]:
        """A worker gave a group up. Returns whether that ends the group (its prompt is then replaced by another)."""
        seat = self.seats.get(peer)
        group = self._groups.get(name)
        if seat is None:
            return False, []
        seat.heard = now
        if group is None or group.holder != peer or group.state != "leased":
            return False, [Free(peer, (name,), "superseded")]
        seat.leases.discard(name)
        del self._groups[name]
        self._count_drop(group, reason)
        return True, [Free(peer, (name,), "dropped"), *self._pump()]

    # ------------------------------------------------------------------------------------------ workers
    def on_hello(
        self,
        peer: Peer,
        worker: str,
        generation: Generation,
        credits: int,
        holds: Collection[str],
        now: float,
    ) -> list[Action]:
        """A worker connected, or came back on a new connection, and says which groups it runs or keeps.

        What an earlier connection of the same worker held and this one does not is lost.
        """
        if any(seat.worker == worker and seat.generation > generation for seat in self.seats.values()):
            return [Free(peer, tuple(holds), "superseded")] if holds else []
        seat = Seat(peer, worker, generation, credits, now)
        for old in [seat for seat in self.seats.values() if seat.worker == worker]:
            for name in sorted((old.leases | old.keeps) & set(holds)):
                self._groups[name].holder = peer
                (seat.leases if name in old.leases else seat.keeps).add(name)
            old.leases -= seat.leases
            old.keeps -= seat.keeps
            self._leave(old)
        self.seats[peer] = seat
        return [*self._reconcile(seat, holds), *self._pump()]

    def on_beat(self, peer: Peer, running: Collection[str], now: float) -> list[Action]:
        """A worker is alive and says what it runs. One that had been silent gets back what nobody else has yet."""
        seat = self.seats.get(peer)
        if seat is None:
            return []
        seat.heard = now
        if not seat.silent:
            return []
        seat.silent = False
        return [*self._reconcile(seat, running), *self._pump()]

    def _reconcile(self, seat: Seat, holds: Collection[str]) -> list[Action]:
        unwanted: list[str] = []
        actions: list[Action] = []
        for name in sorted(holds):
            group = self._groups.get(name)
            if self._adopting_until is not None and group is None:
                self._claims[name] = seat.peer
            elif self._adopting_until is not None and group is not None and group.state == "pending":
                actions.append(self._to_holder(name, seat.peer))
            elif group is None or (group.holder not in (None, seat.peer) and group.state == "received"):
                unwanted.append(name)
            elif group.state == "pending" and seat.worker in group.lost_by:
                self._pending.remove(name)
                group.lost_by.discard(seat.worker)
                self._count_drop(group, "lost", -1)
                group.state, group.holder = "leased", seat.peer
                seat.leases.add(name)
        return [*actions, *([Free(seat.peer, tuple(unwanted), "superseded")] if unwanted else [])]

    def on_lost(self, peer: Peer) -> list[Action]:
        """A worker process is gone: its groups are dispatched again."""
        seat = self.seats.pop(peer, None)
        if seat is None:
            return []
        self._leave(seat)
        return self._pump()

    def on_tick(self, now: float) -> list[Action]:
        """Dispatch the groups of workers that have been silent for too long again; they may still deliver."""
        actions: list[Action] = []
        if self._adopting_until is not None and now > self._adopting_until:
            self._adopting_until = None
            unwanted: dict[Peer, list[str]] = {}
            for name, peer in self._claims.items():
                unwanted.setdefault(peer, []).append(name)
            actions = [Free(peer, tuple(names), "superseded") for peer, names in unwanted.items() if peer in self.seats]
            self._claims.clear()
            for group in (self._groups[name] for name in self._pending):
                if group.again:
                    self._count_dispatch(group)
                    self._count_drop(group, "regenerate")
        for seat in self.seats.values():
            if not seat.silent and now - seat.heard > self._lease_s:
                seat.silent = True
                self._release(seat)
        return [*actions, *self._pump()]

    def _leave(self, seat: Seat) -> None:
        self.seats.pop(seat.peer, None)
        self._release(seat)
        for name in seat.keeps:
            self._groups[name].holder = None

    def _release(self, seat: Seat) -> None:
        lost = sorted(seat.leases)
        seat.leases.clear()
        for name in lost:
            group = self._groups[name]
            group.state, group.holder = "pending", None
            group.lost_by.add(seat.worker)
            self._count_drop(group, "lost")
        self._pending.extendleft(reversed(lost))

    # ------------------------------------------------------------------------------------------ counting
    def _pump(self) -> list[Action]:
        """Pending groups go to the worker with the most free credits, one after the other."""
        if not self._pending or self._adopting_until is not None:
            return []
        actions: list[Action] = []
        free = [
            (len(seat.leases) - seat.credits, place, seat)
            for place, seat in enumerate(self.seats.values())
            if not seat.silent and len(seat.leases) < seat.credits
        ]
        heapq.heapify(free)
        while self._pending and free:
            room, place, seat = free[0]
            name = self._pending.popleft()
            group = self._groups[name]
            group.state, group.holder = "leased", seat.peer
            seat.leases.add(name)
            self._count_dispatch(group)
            actions.append(Run(seat.peer, name))
            if room + 1 < 0:
                heapq.heapreplace(free, (room + 1, place, seat))
            else:
                heapq.heappop(free)
        return actions

    def _count_dispatch(self, group: _Group) -> None:
        if group.counted:
            self.accounts.dispatched += 1

    def _count_drop(self, group: _Group, reason: str, count: int = 1) -> None:
        if group.counted:
            self.accounts.drop(reason, count)

    @property
    def open_dispatches(self) -> int:
        """Counted groups that are leased or received."""
        return sum(group.counted and group.state != "pending" for group in self._groups.values())

    def claimed(self, name: str) -> bool:
        """Whether a worker holds this group and nobody has asked for it yet."""
        return name in self._claims

    def holder(self, name: str) -> Peer | None:
        """Who runs a group now."""
        group = self._groups.get(name)
        return group.holder if group is not None and group.state == "leased" else None

    @property
    def groups(self) -> list[str]:
        """Every group whose story is open."""
        return list(self._groups)

    def where(self, name: str) -> str:
        """For progress lines: what holds a group up."""
        group = self._groups.get(name)
        if group is None or group.holder is None:
            return "no worker has a free credit" if self.seats else "no rollout worker is connected"
        return f"{group.state} at {self.seats[group.holder].worker}"
