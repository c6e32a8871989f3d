"""How the driver and the trainer ranks talk to the executor."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from miles_hpc.wire.address import HostAndPort

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch
    from miles_hpc.transport.carriers import Carrier, ParcelRef
    from miles_hpc.wire.client import HubClient

POOL = "executor"
_ANSWER_MARGIN_S = 10.0
_WATCH_S, _WATCH_TIMEOUT_S = 1.0, 5.0
_AGAIN_S = 0.2
_PULL_S = 60.0

log = logging.getLogger(__name__)


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout, held by the executor until every rank acknowledged its shard."""

    rollout_id: int
    groups: list[str]
    """Group ids, sorted."""
    reward_mean: float
    tokens: int
    """Generated tokens (loss mask 1) of all samples."""
    metrics: dict[str, float] = {}
    seconds: float = 0.0
    weight_version: int = 0
    place: dict[str, Any] = {}
    """Where the data order stands after it; a `DataState`."""


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was generated and not yet committed, as the driver says it to a new executor."""

    rollout_id: int
    weight_version: int
    groups: list[str]
    place: dict[str, Any]


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out evaluation. The first three fields are of the first data set."""

    accuracy: float
    """Mean reward of the `n` scored samples."""
    n: int
    failed: int = 0
    """Prompts whose generation or reward failed; they are no zeros in the mean."""
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    """Of each data set: `<name>/reward`, `/pass@k`, `/truncated`, `/failed` …"""


class CommitData(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit records of the rollouts since the last one."""

    ledger: list[dict[str, Any]]
    """One line per group: step, group, prompt_index, epoch, samples, digest, weight_versions, attempt."""
    data_state: dict[str, Any]
    """What `open` takes to go on after these groups; holds the counts too."""
    counts: dict[str, Any]
    """{dispatched, committed, returned, dropped: {reason: n}}, as they are once this commit is durable."""


def executor_address(hub: HubClient) -> HostAndPort | None:
    """Where the executor answers calls now; None while the address book has none."""
    cells = hub.pools.get(POOL, [])
    return cells[0].workers[0]["rpc"] if cells else None


class ExecutorClient:
    """The driver's end. Every call names the training incarnation that `open` began.

    An executor that is lost and comes back empty is told which rollouts there are, and goes on with them: calls that
    were under way are made again. Nothing that workers hold is generated again, nothing is delivered twice.

    Raises (all calls):
        RpcTimeout, RpcUnreachable: no answer in `timeout_s`.
        RpcRemoteError: the executor refused, e.g. `StaleIncarnation`, `RolloutFailed`, `RewardsFailing`.
    """

    def __init__(self, hub: HubClient, *, timeout_s: float = 60.0, rollout_timeout_s: float = 24 * 3600.0) -> None:
        from miles_hpc.wire.rpc import RpcClient

        self._rpc = RpcClient(lambda: executor_address(hub), hub.env.run_dir, hub.env.attempt)
        self._timeout_s = timeout_s
        self._rollout_timeout_s = rollout_timeout_s
        self._incarnation = 0
        self._state: dict[str, Any] | None = None
        self._prepared: dict[int, dict[str, Any]] = {}
        self._announced: dict[int, Announced] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> int:
        """The incarnation of the last `open`; 0 before."""
        return self._incarnation

    async def open(self, incarnation: int, state: dict[str, Any] | None) -> dict[str, Any]:
        """Go back to a committed state; all work of lower incarnations is superseded.

        Args:
            incarnation: from the driver's `open` commit.
            state: `data_state` of the newest commit; None in a fresh run.

        Returns:
            {prompts, heldout}: sizes of the data sets.
        """
        params = {"incarnation": incarnation, "state": state}
        answer = await self._rpc.call("open", params, timeout_s=self._timeout_s)
        self._incarnation, self._state = incarnation, state
        self._announced.clear()
        self._prepared.clear()
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._watch_executor())
        return dict(answer)

    async def _watch_executor(self) -> None:
        """Ranks may wait for an executor that waits to be told: look, while the driver makes no call itself."""
        from miles_hpc.wire.rpc import RpcError

        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                if not await self._rpc.call("hello", {}, timeout_s=_WATCH_TIMEOUT_S):
                    await self._announce()
            except RpcError as error:
                log.debug("the executor does not answer: %s", error)

    async def _announce(self) -> None:
        log.warning("the executor is a new one: %d rollouts are announced to it", len(self._announced))
        params = {
            "incarnation": self._incarnation,
            "state": self._state,
            "announced": msgspec.to_builtins([self._announced[number] for number in sorted(self._announced)]),
        }
        await self._rpc.call("open", params, timeout_s=self._timeout_s)

    async def generate(self, rollout_id: int, weight_version: int) -> RolloutResult:
        """Generate and score one batch. Asked again with the same id, the same rollout is returned.

        The executor bounds this by sample deadlines and by its limits on failures, and logs progress every 10 s.
        """
        answer = await self._call("generate", rollout_id=rollout_id, weight_version=weight_version, long=True)
        result = msgspec.convert(answer, RolloutResult)
        self._announced[rollout_id] = Announced(
            rollout_id=rollout_id,
            weight_version=result.weight_version,
            groups=result.groups,
            place=result.place,
        )
        return result

    async def evaluate(self, weight_version: int, limit: int = 0) -> EvalResult:
        """Evaluate the held-out prompts, the first `limit` of them (0: all)."""
        answer = await self._call("evaluate", weight_version=weight_version, limit=limit, long=True)
        return msgspec.convert(answer, EvalResult)

    async def prepare_commit(self, rollout_id: int) -> CommitData:
        """What a commit after `rollout_id` must hold. Changes nothing; may be asked again."""
        data = msgspec.convert(await self._call("prepare_commit", rollout_id=rollout_id, long=True), CommitData)
        self._prepared[rollout_id] = data.data_state
        return data

    async def committed(self, rollout_id: int) -> None:
        """The commit is durable: free its groups here and at the workers. May be sent again."""
        await self._call("committed", rollout_id=rollout_id)
        self._state = self._prepared.pop(rollout_id, self._state)
        self._announced = {number: one for number, one in self._announced.items() if number > rollout_id}

    async def counts(self, *, final: bool = False) -> dict[str, Any]:
        """{dispatched, committed, returned, dropped: {reason: n}, in_flight}; dispatched is the sum of the rest.

        Args:
            final: the run ends here, so whatever is in flight is reported as returned: a resumed run does it again.
        """
        return dict(await self._call("counts", final=final))

    async def _call(self, method: str, *, long: bool = False, **params: Any) -> Any:
        from miles_hpc.wire.rpc import RpcRemoteError, RpcUnreachable

        timeout_s = self._rollout_timeout_s if long else self._timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await self._rpc.call(
                    method, {"incarnation": self._incarnation, **params}, timeout_s=deadline - time.monotonic()
                )
            except RpcUnreachable as error:
                # Every call may be made twice; the executor that got it may be gone.
                if time.monotonic() + _AGAIN_S >= deadline:
                    raise
                log.warning("the executor is lost in %s: %s", method, error)
            except RpcRemoteError as error:
                if not _is_new(error) or not self._incarnation or time.monotonic() + _AGAIN_S >= deadline:
                    raise
                await self._announce()
            await asyncio.sleep(_AGAIN_S)

    async def close(self) -> None:
        """Close the connection."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._rpc.close()


def _is_new(error: Exception) -> bool:
    return "NotOpened" in str(error)


class BatchReader:
    """A trainer rank's end: blocking, one call at a time.

    Args:
        hub: the rank's hub client.
        incarnation: of the driver's `open` commit; the driver says it to the ranks, and a lower one is refused. May be
            set later by assigning `incarnation`.
        carrier: see `Inbox`.
    """

    def __init__(self, hub: HubClient, incarnation: int = 0, *, carrier: Carrier = "auto") -> None:
        from miles_hpc.transport.carriers import Inbox
        from miles_hpc.wire.rpc import SyncRpcClient

        self._inbox = Inbox(carrier)
        self._fetched: dict[tuple[int, int], ParcelRef] = {}
        self._rpc = SyncRpcClient(lambda: executor_address(hub), hub.env.run_dir, hub.env.attempt)
        self.incarnation = incarnation

    @classmethod
    def at(cls, address: HostAndPort, run_dir: Path, attempt: int, incarnation: int) -> BatchReader:
        """A reader outside the run's own processes, which have the address book."""
        from miles_hpc.transport.carriers import Inbox
        from miles_hpc.wire.rpc import SyncRpcClient

        reader = cls.__new__(cls)
        reader._inbox, reader._fetched = Inbox(), {}
        reader._rpc = SyncRpcClient(address, run_dir, attempt)
        reader.incarnation = incarnation
        return reader

    def get(self, rollout_id: int, dp_rank: int, dp_size: int, timeout_s: float = 600.0) -> TrainBatch:
        """This rank's shard of a rollout. The same shard is returned until it is acknowledged, and is valid until then.

        Raises:
            BulkError: the shard is on another node and did not come; see `transport.bulk`.
            RpcRemoteError: `UnknownRollout` when no such rollout was finished in `timeout_s`, `StaleIncarnation`, or
                `UnevenSplit` when the batch does not divide by `dp_size`.
            RpcTimeout, RpcUnreachable: no answer at all.
        """
        from miles_hpc.rollout.convert import TrainBatch
        from miles_hpc.transport.bulk import BulkError
        from miles_hpc.transport.carriers import ParcelRef

        params = {
            "incarnation": self.incarnation,
            "rollout_id": rollout_id,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "timeout_s": timeout_s,
            "place": self._inbox.place,
        }
        deadline = time.monotonic() + timeout_s
        while True:
            answer, frames = self._call("get", params, deadline - time.monotonic() + _ANSWER_MARGIN_S)
            if frames:
                return TrainBatch.from_parcel(frames[0])
            ref = msgspec.convert(answer, ParcelRef)
            self._fetched[rollout_id, dp_rank] = ref
            try:
                memory = self._inbox.fetch(ref, min(_PULL_S, deadline - time.monotonic()))
            except BulkError as error:
                # Of an executor that is gone by now; the next one offers the shard anew.
                if time.monotonic() + _AGAIN_S >= deadline:
                    raise
                log.warning("shard %d of rollout %d did not come: %s", dp_rank, rollout_id, error)
                continue
            return TrainBatch.from_parcel(memory)

    def ack(self, rollout_id: int, dp_rank: int, timeout_s: float = 60.0) -> None:
        """The shard is used up; the executor may free it. May be sent again."""
        params = {"incarnation": self.incarnation, "rollout_id": rollout_id, "dp_rank": dp_rank}
        self._call("ack", params, timeout_s)
        ref = self._fetched.pop((rollout_id, dp_rank), None)
        if ref is not None:
            self._inbox.release(ref)

    def _call(self, method: str, params: dict[str, Any], timeout_s: float) -> tuple[Any, list[memoryview]]:
        """A call that is made again while a lost executor comes back."""
        from miles_hpc.wire.rpc import RpcRemoteError, RpcUnreachable

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._rpc.call_frames(method, params, timeout_s=deadline - time.monotonic())
            except (RpcUnreachable, RpcRemoteError) as error:
                again = isinstance(error, RpcUnreachable) or _is_new(error)
                if not again or time.monotonic() + _AGAIN_S >= deadline:
                    raise
                log.warning("the executor is lost in %s: %s", method, error)
            time.sleep(_AGAIN_S)

    def close(self) -> None:
        """Close the connections."""
        self._inbox.close()
        self._rpc.close()
