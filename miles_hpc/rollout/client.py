"""How the driver and the trainer ranks talk to the executor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from miles_hpc.transport.carriers import Carrier, ParcelRef
from miles_hpc.wire.address import HostAndPort

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch
    from miles_hpc.wire.client import HubClient

POOL = "executor"
_ANSWER_MARGIN_S = 10.0


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
        answer = await self._rpc.call("open", {"incarnation": incarnation, "state": state}, timeout_s=self._timeout_s)
        self._incarnation = incarnation
        return dict(answer)

    async def generate(self, rollout_id: int, weight_version: int) -> RolloutResult:
        """Generate and score one batch. Asked again with the same id, the same rollout is returned.

        The executor bounds this by sample deadlines and by its limits on failures, and logs progress every 10 s.
        """
        answer = await self._call("generate", rollout_id=rollout_id, weight_version=weight_version, long=True)
        return msgspec.convert(answer, RolloutResult)

    async def evaluate(self, weight_version: int, limit: int = 0) -> EvalResult:
        """Evaluate the held-out prompts, the first `limit` of them (0: all)."""
        answer = await self._call("evaluate", weight_version=weight_version, limit=limit, long=True)
        return msgspec.convert(answer, EvalResult)

    async def prepare_commit(self, rollout_id: int) -> CommitData:
        """What a commit after `rollout_id` must hold. Changes nothing; may be asked again."""
        return msgspec.convert(await self._call("prepare_commit", rollout_id=rollout_id), CommitData)

    async def committed(self, rollout_id: int) -> None:
        """The commit is durable: free its groups here and at the workers. May be sent again."""
        await self._call("committed", rollout_id=rollout_id)

    async def counts(self, *, final: bool = False) -> dict[str, Any]:
        """{dispatched, committed, returned, dropped: {reason: n}, in_flight}; dispatched is the sum of the rest.

        Args:
            final: the run ends here, so whatever is in flight is reported as returned: a resumed run does it again.
        """
        return dict(await self._call("counts", final=final))

    async def _call(self, method: str, *, long: bool = False, **params: Any) -> Any:
        timeout_s = self._rollout_timeout_s if long else self._timeout_s
        return await self._rpc.call(method, {"incarnation": self._incarnation, **params}, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._rpc.close()


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

        params = {
            "incarnation": self.incarnation,
            "rollout_id": rollout_id,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "timeout_s": timeout_s,
        }
        answer, frames = self._rpc.call_frames("get", params, timeout_s=timeout_s + _ANSWER_MARGIN_S)
        if frames:
            return TrainBatch.from_parcel(frames[0])
        ref = msgspec.convert(answer, ParcelRef)
        self._fetched[rollout_id, dp_rank] = ref
        return TrainBatch.from_parcel(self._inbox.fetch(ref, timeout_s))

    def ack(self, rollout_id: int, dp_rank: int, timeout_s: float = 60.0) -> None:
        """The shard is used up; the executor may free it. May be sent again."""
        params = {"incarnation": self.incarnation, "rollout_id": rollout_id, "dp_rank": dp_rank}
        self._rpc.call("ack", params, timeout_s=timeout_s)
        ref = self._fetched.pop((rollout_id, dp_rank), None)
        if ref is not None:
            self._inbox.release(ref)

    def close(self) -> None:
        """Close the connections."""
        self._inbox.close()
        self._rpc.close()
