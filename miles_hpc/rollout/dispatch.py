"""The executor's end of the `work` port: the board's decisions become messages, the workers' messages its events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np

from miles_hpc.rollout.accounts import Accounts, is_filtered
from miles_hpc.rollout.board import Action, Board, Ending, Run
from miles_hpc.rollout.collect import Collector, StaleIncarnation
from miles_hpc.rollout.fetch import ParcelFetcher
from miles_hpc.rollout.groups import Group, faults, groups_of
from miles_hpc.rollout.work_messages import (
    BeatSeen,
    Done,
    FreeGroups,
    GroupFailed,
    GroupPartial,
    GroupsDone,
    GroupsReceived,
    InterruptGroups,
    RunGroup,
    SendInline,
    Stage,
    ToExecutor,
    WorkBeat,
    WorkHello,
    WorkWelcome,
)
from miles_hpc.rollout.work_socket import WorkServer
from miles_hpc.specs.rollout import ROLLOUT_WORKER_POOL
from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.transport.bulk import BulkError
from miles_hpc.transport.carriers import ParcelRef
from miles_hpc.transport.columns import Buffer, SchemaError
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import cell_of
from miles_hpc.wire.messages import CellAddrs

log = logging.getLogger(__name__)

_TICK_S = 0.5
_ADOPT_S = 3.0
"""How long a new executor waits for its workers to come back before it has anything done again."""
_COPY_BELOW = 64 * 1024


class Dispatcher:
    """Sends groups to workers and takes them in, for one incarnation at a time.

    Args:
        listen: of the `work` port.
        lease_s: silence of a worker after which its groups are dispatched again.
        is_published: whether the trainer has published a weight version; groups with others are refused.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        listen: HostAndPort,
        run_dir: Path,
        attempt: int,
        *,
        lease_s: float,
        is_published: Callable[[int], bool] = lambda version: True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._board = Board(lease_s, Accounts())
        self._is_published = is_published
        self._incarnation = 0
        self._orders: dict[str, RunGroup] = {}
        self._collectors: dict[str, Collector] = {}
        self._stages: dict[str, Stage] = {}
        self._columns: dict[str, str] | None = None
        """Extra columns of this incarnation's groups, by the first that came."""
        self._waiting: dict[bytes, WorkHello] = {}
        """Hellos that came before any incarnation began."""
        self._in_book: set[bytes] = set()
        """Workers whose generation the address book has shown: only these can leave it."""
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._fetcher = ParcelFetcher()
        self._pulls: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        """By worker and parcel: what is on its way from another node."""
        self._server = WorkServer(listen, run_dir, attempt, self._guarded)

    @property
    def address(self) -> HostAndPort:
        """Where workers connect."""
        return self._server.address

    @property
    def accounts(self) -> Accounts:
        """Counts over the whole run."""
        return self._board.accounts

    def checked_accounts(self) -> Accounts:
        """The accounts. Raises ConservationBroken when they do not add up."""
        self.accounts.check(self._board.open_dispatches)
        return self.accounts

    async def run(self) -> None:
        """Watch the leases until cancelled.

        Raises:
            Exception: handling a worker's message failed, which is a bug here: better no executor than a deaf one.
        """
        while True:
            await asyncio.wait([self._failure], timeout=_TICK_S)
            if self._failure.done():
                self._failure.result()
            self._act(self._board.on_tick(self._loop.time()))

    def close(self) -> None:
        """Release the address."""
        for pull in self._pulls.values():
            pull.cancel()
        self._server.close()
        self._fetcher.close()

    # ------------------------------------------------------------------------------------------ executor's side
    def begin(self, incarnation: int, counts: Accounts, *, adopt: bool = False) -> None:
        """Supersede all open work and begin an incarnation.

        Args:
            counts: of the commit that it begins from. A process that was there has counted more since; of what it took
                for open, the commit may hold some.
            adopt: the incarnation is a living one, whose executor was lost: what workers hold of it is taken over.
        """
        for collector in set(self._collectors.values()):
            collector.fail(StaleIncarnation(f"{collector.what} was ended by training incarnation {incarnation}"))
        self._act(self._board.settle(self._board.groups, "superseded"))
        self._orders.clear()
        self._collectors.clear()
        self._stages.clear()
        accounts = self.accounts
        if not accounts.dispatched:
            self._board.accounts = counts
        elif counts.committed > accounts.committed:
            late = counts.committed - accounts.committed
            accounts.committed += late
            accounts.drop("superseded", -late)
        self._incarnation = incarnation
        self._columns = None
        for peer in self._board.seats:
            self._server.send(peer, WorkWelcome(incarnation=incarnation))
        if adopt:
            self._board.adopt(self._loop.time() + _ADOPT_S)
        waiting, self._waiting = self._waiting, {}
        for peer, hello in waiting.items():
            self._on_hello(peer, hello, self._loop.time())

    def dispatch(
        self, orders: Sequence[RunGroup], collector: Collector, *, counted: bool = True, again: bool = False
    ) -> None:
        """Have these groups run; their ends are told to the collector. `counted`, `again`: see `Board.add`."""
        names = [order.spec.id for order in orders]
        for order in orders:
            self._orders[order.spec.id] = order
            self._collectors[order.spec.id] = collector
        collector.expect(names)
        self._act(self._board.add(names, counted=counted, again=again))

    def settle(self, groups: Collection[str], how: Ending, reason: str = "") -> None:
        """These groups are over; see `Board.settle`."""
        for name in groups:
            self._forget(name)
        self._act(self._board.settle(groups, how, reason))

    def interrupt(self, groups: Collection[str]) -> list[str]:
        """Have running groups end with what they have; their collector gets it. Returns those that run."""
        running: dict[bytes, list[str]] = {}
        for name in groups:
            if (peer := self._board.holder(name)) is not None:
                running.setdefault(peer, []).append(name)
        for peer, names in running.items():
            self._server.send(peer, InterruptGroups(incarnation=self._incarnation, groups=names))
        return [name for names in running.values() for name in names]

    def where(self, group: str) -> str:
        """What an open group waits for."""
        stage = self._stages.get(group)
        return self._board.where(group) + (f", {stage.stage!r} for {stage.seconds:.0f} s" if stage else "")

    def on_pools(self, pools: dict[str, list[CellAddrs]]) -> None:
        """A worker that has left the address book, or was started again, is lost. Call in the loop."""
        cells = {cell.cell: cell.generation for cell in pools.get(ROLLOUT_WORKER_POOL, [])}
        for peer, seat in list(self._board.seats.items()):
            current = cells.get(cell_of(seat.worker))
            replaced = current is not None and current > seat.generation
            if current == seat.generation:
                self._in_book.add(peer)
            elif replaced or (current is None and peer in self._in_book):
                log.warning(
                    "rollout worker %s g%s is gone; its groups are dispatched again", seat.worker, seat.generation
                )
                self._in_book.discard(peer)
                self._act(self._board.on_lost(peer))
        self._in_book &= set(self._board.seats)

    # ------------------------------------------------------------------------------------------ workers' side
    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                self._server.send(action.peer, self._orders[action.group])
            else:
                freed = FreeGroups(incarnation=self._incarnation, groups=list(action.groups), reason=action.reason)
                self._server.send(action.peer, freed)

    def _guarded(self, peer: bytes, message: ToExecutor, parcel: memoryview | None) -> None:
        try:
            self._on_message(peer, message, parcel)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _on_message(self, peer: bytes, message: ToExecutor, parcel: memoryview | None) -> None:
        now = self._loop.time()
        match message:
            case WorkHello():
                self._on_hello(peer, message, now)
            case WorkBeat():
                if peer in self._board.seats:  # one that is unknown must say hello: it notices that nobody answers
                    self._stages.update((one.group, one) for one in message.oldest if one.group in self._orders)
                    running = message.running if message.incarnation == self._incarnation else []
                    self._act(self._board.on_beat(peer, running, now))
                    self._server.send(peer, BeatSeen())
            case GroupsDone() | GroupPartial() | GroupFailed() if message.incarnation != self._incarnation:
                names = [done.group for done in message.groups] if isinstance(message, GroupsDone) else [message.group]
                freed = FreeGroups(incarnation=message.incarnation, groups=names, reason="superseded")
                self._server.send(peer, freed)
            case GroupsDone(ref=None):
                self._on_done(peer, message.groups, _settled(parcel), now)
            case GroupsDone(ref=ParcelRef() as ref):
                self._on_parcel(peer, message, ref, now)
            case GroupPartial():
                self._on_partial(peer, message)
            case GroupFailed():
                self._on_failed(peer, message, now)

    def _on_hello(self, peer: bytes, hello: WorkHello, now: float) -> None:
        if not self._incarnation:
            # Nothing is known yet, so nothing can be said about what the worker holds.
            self._waiting[peer] = hello
            return
        log.info("rollout worker %s g%s (pid %d) is connected", hello.worker, hello.generation, hello.pid)
        self._server.send(peer, WorkWelcome(incarnation=self._incarnation))
        holds = hello.holds if hello.incarnation == self._incarnation else []
        self._act(self._board.on_hello(peer, hello.worker, hello.generation, hello.credits, holds, now))

    def _on_parcel(self, peer: bytes, done: GroupsDone, ref: ParcelRef, now: float) -> None:
        """Groups whose parcel stayed at the worker: mapped at once on this node, pulled from another."""
        if not any(one.group in self._orders for one in done.groups):
            self._on_done(peer, done.groups, b"", now)
        elif (memory := self._fetcher.view(ref)) is not None:
            self._on_done(peer, done.groups, memory, now)
        elif (peer, ref.id) not in self._pulls:
            pull = asyncio.ensure_future(self._pull(peer, done, ref))
            self._pulls[peer, ref.id] = pull
            pull.add_done_callback(lambda _: self._pulls.pop((peer, ref.id), None))

    async def _pull(self, peer: bytes, done: GroupsDone, ref: ParcelRef) -> None:
        try:
            memory = await self._fetcher.pull(ref)
        except BulkError as error:
            names = [one.group for one in done.groups]
            log.warning("group %s could not be pulled and is asked for inline: %s", names[0], error)
            self._server.send(peer, SendInline(incarnation=done.incarnation, groups=names))
            return
        except Exception as error:
            self._fail(error)
            return
        self._guarded(peer, msgspec.structs.replace(done, ref=None), memory)

    def _on_done(self, peer: bytes, dones: Sequence[Done], parcel: Buffer, now: float) -> None:
        names = [done.group for done in dones]
        calls = {done.group: done.reward_calls for done in dones}
        groups, wrong = self._checked(dones, parcel)
        for name, (reason, text) in wrong.items():
            failed = GroupFailed(incarnation=self._incarnation, group=name, reason=reason, text=f"group {name}: {text}")
            self._on_failed(peer, failed, now)
        first, actions = self._board.on_done(peer, [name for name in names if name not in wrong], now)
        received = [name for name in names if name not in wrong and not self._board.claimed(name)]
        # The board takes nothing of a peer without a seat: acknowledged, a group of its would never be sent again.
        if received and peer in self._board.seats:
            self._server.send(peer, GroupsReceived(incarnation=self._incarnation, groups=received))
        for name in first:
            self._collectors[name].on_result(name, groups[name], calls[name])
            self._forget(name)
        self._act(actions)

    def _checked(self, dones: Sequence[Done], parcel: Buffer) -> tuple[dict[str, Group], dict[str, tuple[str, str]]]:
        """Those groups of a parcel that somebody waits for, and reason and text for those that cannot be used."""
        ordered = {done.group: self._orders[done.group].samples for done in dones if done.group in self._orders}
        if not ordered:
            return {}, {}
        try:
            batch = RolloutBatch.from_parcel(parcel)
            found = groups_of(batch, [done.samples for done in dones])
        except SchemaError as error:
            return {}, {name: ("invalid_sample", str(error)) for name in ordered}
        groups = {done.group: group for done, group in zip(dones, found, strict=True)}
        for done in dones:
            groups[done.group].stats = done.stats
            if len(done.categories) == done.samples:
                groups[done.group].categories = done.categories
        samples = [ordered.get(done.group, done.samples) for done in dones]
        wrong = {
            dones[place].group: ("invalid_sample", text)
            for place, text in faults(batch, found, samples).items()
            if dones[place].group in ordered
        }
        trained = [name for name in ordered if not self._orders[name].evaluation and name not in wrong]
        if trained and (text := self._other_columns(batch)):
            wrong |= dict.fromkeys(trained, ("invalid_sample", text))
        for version in np.unique(batch.spans[:, 0]).tolist():
            if not self._is_published(version):
                text = f"tokens came from weight version {version}, which the trainer never published"
                held = [name for name in ordered if (groups[name].batch.spans[:, 0] == version).any()]
                wrong |= {name: ("unpublished_version", text) for name in held if name not in wrong}
        return groups, wrong

    def _other_columns(self, batch: RolloutBatch) -> str:
        """What is wrong with a batch whose columns are not those of the incarnation's first: they become one batch."""
        columns = {name: f"{column.dtype}{list(column.shape[1:])}" for name, column in sorted(batch.extra.items())}
        if self._columns is None:
            self._columns = columns
        if columns == self._columns:
            return ""
        return f"has the extra columns {columns}; those of the groups before it are {self._columns}"

    def _on_partial(self, peer: bytes, partial: GroupPartial) -> None:
        collector = self._collectors.get(partial.group)
        if collector is None or self._board.holder(partial.group) != peer:
            freed = FreeGroups(incarnation=self._incarnation, groups=[partial.group], reason="superseded")
            self._server.send(peer, freed)
            return
        self.settle([partial.group], "returned")
        collector.on_partial(partial.group, partial.samples)

    def _on_failed(self, peer: bytes, failed: GroupFailed, now: float) -> None:
        ended, actions = self._board.on_failed(peer, failed.group, failed.reason, now)
        if ended:
            if not is_filtered(failed.reason):
                log.warning("group %s was dropped (%s): %s", failed.group, failed.reason, failed.text[-2000:])
            collector = self._collectors[failed.group]
            self._forget(failed.group)
            collector.on_drop(failed.group, failed.reason, failed.text, failed.reward_calls)
        self._act(actions)

    def _forget(self, group: str) -> None:
        self._orders.pop(group, None)
        self._collectors.pop(group, None)
        self._stages.pop(group, None)


def _settled(parcel: memoryview | None) -> Buffer:
    """A small parcel in memory of its own: a message of ZeroMQ takes more room than what is in it."""
    if parcel is None:
        return b""
    return bytes(parcel) if len(parcel) < _COPY_BELOW else parcel
