"""The executor's end of the `work` port: the board's decisions become messages, the workers' messages its events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from miles_hpc.rollout.accounts import Accounts, is_filtered
from miles_hpc.rollout.board import Action, Board, Ending, Run
from miles_hpc.rollout.collect import Collector, StaleIncarnation
from miles_hpc.rollout.sample import group_versions
from miles_hpc.rollout.work_messages import (
    BeatSeen,
    FreeGroups,
    GroupDone,
    GroupFailed,
    GroupPartial,
    GroupReceived,
    InterruptGroups,
    RunGroup,
    Stage,
    ToExecutor,
    WorkBeat,
    WorkHello,
    WorkWelcome,
)
from miles_hpc.rollout.work_socket import WorkServer
from miles_hpc.specs.rollout import ROLLOUT_WORKER_POOL
from miles_hpc.transport.batch import RolloutBatch
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
        self._waiting: dict[bytes, WorkHello] = {}
        """Hellos that came before any incarnation began."""
        self._in_book: set[bytes] = set()
        """Workers whose generation the address book has shown: only these can leave it."""
        self._failure: asyncio.Future[None] = self._loop.create_future()
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
        self._server.close()

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
        for peer in self._board.seats:
            self._server.send(peer, WorkWelcome(incarnation=incarnation))
        if adopt:
            self._board.adopt(self._loop.time() + _ADOPT_S)
        waiting, self._waiting = self._waiting, {}
        for peer, hello in waiting.items():
            self._on_hello(peer, hello, self._loop.time())

    def dispatch(self, orders: Sequence[RunGroup], collector: Collector, *, counted: bool = True) -> None:
        """Have these groups run; their ends are told to the collector."""
        names = [order.spec.id for order in orders]
        for order in orders:
            self._orders[order.spec.id] = order
            self._collectors[order.spec.id] = collector
        collector.expect(names)
        self._act(self._board.add(names, counted=counted))

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
            if not self._failure.done():
                self._failure.set_exception(error)

    def _on_message(self, peer: bytes, message: ToExecutor, parcel: memoryview | None) -> None:
        now = self._loop.time()
        match message:
            case WorkHello():
                self._on_hello(peer, message, now)
            case WorkBeat():
                if peer in self._board.seats:  # one that is unknown must say hello: it notices that nobody answers
                    self._stages.update((stage.group, stage) for stage in message.running)
                    running = [stage.group for stage in message.running]
                    self._act(
                        self._board.on_beat(peer, running if message.incarnation == self._incarnation else [], now)
                    )
                    self._server.send(peer, BeatSeen())
            case GroupDone() | GroupPartial() | GroupFailed() if message.incarnation != self._incarnation:
                freed = FreeGroups(incarnation=message.incarnation, groups=[message.group], reason="superseded")
                self._server.send(peer, freed)
            case GroupDone():
                self._on_done(peer, message, parcel, now)
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

    def _on_done(self, peer: bytes, done: GroupDone, parcel: memoryview | None, now: float) -> None:
        order = self._orders.get(done.group)
        if order is not None:
            try:
                batch = RolloutBatch.from_parcel(_settled(parcel))
                check_group(batch, order.samples)
                reason, text = "unpublished_version", self._unpublished(batch)
            except SchemaError as error:
                reason, text = "invalid_sample", str(error)
            if text:
                text = f"group {done.group}: {text}"
                self._on_failed(
                    peer, GroupFailed(incarnation=done.incarnation, group=done.group, reason=reason, text=text), now
                )
                return
        first, actions = self._board.on_done(peer, done.group, now)
        if not self._board.claimed(done.group):
            self._server.send(peer, GroupReceived(incarnation=self._incarnation, group=done.group))
        if first and order is not None:
            self._collectors[done.group].on_result(done.group, batch, done.reward_calls)
            self._forget(done.group)
        self._act(actions)

    def _unpublished(self, batch: RolloutBatch) -> str:
        for version in group_versions(batch):
            if not self._is_published(version):
                return f"tokens came from weight version {version}, which the trainer never published"
        return ""

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


def check_group(batch: RolloutBatch, samples: int) -> None:
    """Raises SchemaError when a group has another size than ordered, or numbers that cannot be trained on."""
    generations = len(set(batch.sample_index.tolist()))
    if generations != samples:
        raise SchemaError(f"has {generations} samples; expected {samples}")
    for name, column, rows in (("reward", batch.rewards, None), ("log-prob", batch.logprobs, batch.offsets)):
        bad = np.flatnonzero(~np.isfinite(column))
        if len(bad):
            sample = int(bad[0]) if rows is None else int(np.searchsorted(rows, bad[0], side="right")) - 1
            raise SchemaError(f"sample {sample} has a {name} that is not finite")
