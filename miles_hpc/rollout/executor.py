"""The executor: hands prompts to workers, takes finished groups in, and gives each trainer rank its shard."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from miles_hpc.config.schema import Config
from miles_hpc.rollout.accounts import Accounts
from miles_hpc.rollout.client import Announced, CommitData, RolloutResult
from miles_hpc.rollout.collect import Collector, NotOpened, RolloutFailed, StaleIncarnation
from miles_hpc.rollout.convert import TrainData
from miles_hpc.rollout.data import DataSource, DataState, Prompts, open_source
from miles_hpc.rollout.debug import load_rollout, save_rollout
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.evaluate import Evaluator
from miles_hpc.rollout.groups import Gathered
from miles_hpc.rollout.metrics import rollout_metrics
from miles_hpc.rollout.producer import AsyncProducer, Produced, Producer, SyncProducer, progress
from miles_hpc.rollout.published import PublishedVersions
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.rollout.statistics import stat_metrics
from miles_hpc.rollout.work_messages import RunGroup
from miles_hpc.transport.carriers import Outbox, ParcelRef
from miles_hpc.transport.columns import Buffer
from miles_hpc.transport.segments import boot_id
from miles_hpc.wire.time_limit import within

log = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""Smaller shards travel in the answer itself, encrypted; larger ones are parcels of the outbox."""


class UnknownRollout(LookupError):
    """No such rollout is held: it was not generated, not yet, or its shards are used up."""


@dataclass
class _Rollout:
    """A finished rollout: its batch until all ranks have acknowledged it, its ledger until it is committed."""

    result: RolloutResult
    data: TrainData | None
    specs: list[GroupSpec]
    ledger: list[dict[str, Any]]
    place: DataState
    """The place in the data order after this rollout."""
    size: int = 0
    """Ranks that it is split for; 0 until one asks."""
    parcels: dict[int, ParcelRef] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)


class Executor:
    """State of one training incarnation, and the methods that driver and ranks call.

    Args:
        attempt: goes into the ledger.
        dispatcher: the workers.
        outbox: carries the shards.
        published: told the versions that the driver names.

    Raises:
        DataError: a prompt file cannot be used.
    """

    def __init__(
        self,
        config: Config,
        attempt: int,
        run_dir: Path,
        dispatcher: Dispatcher,
        outbox: Outbox,
        published: PublishedVersions,
    ) -> None:
        self._config = config
        self._attempt = attempt
        self._run_dir = run_dir
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._published = published
        replays = config.rollout.load_debug or config.mode == "eval"
        self._prompts: Prompts = [] if replays else open_source(config.data)
        self._source = DataSource(max(1, len(self._prompts)), seed=config.seed, shuffle=config.data.shuffle)
        self._evaluator = Evaluator(config, run_dir, dispatcher)
        make = AsyncProducer if config.mode == "async" else SyncProducer
        self._producer: Producer = make(config, self._source, len(self._prompts), dispatcher, self._order)
        self._version = 0
        self._incarnation = 0
        self._rollouts: dict[int, _Rollout] = {}
        self._calls: dict[int, asyncio.Task[RolloutResult]] = {}
        self._finished = asyncio.Condition()
        self._evaluations = itertools.count()

    def methods(self) -> Mapping[str, Callable[[Any, list[memoryview]], Any]]:
        """What the `rpc` port serves."""
        return {
            "hello": self.hello,
            "open": self.open,
            "generate": self.generate,
            "evaluate": self.evaluate,
            "prepare_commit": self.prepare_commit,
            "committed": self.committed,
            "counts": self.counts,
            "get": self.get,
            "ack": self.ack,
        }

    def _check(self, params: Mapping[str, Any]) -> None:
        asked = params["incarnation"]
        if not self._incarnation:
            raise NotOpened("this executor has begun no training incarnation yet")
        if asked != self._incarnation or not asked:
            here = self._incarnation or "none yet"
            raise StaleIncarnation(f"this call is of training incarnation {asked}; the executor is in {here}")

    # ------------------------------------------------------------------------------------------ driver
    async def hello(self, params: Any, frames: list[memoryview]) -> int:
        """The incarnation that is open here; 0 for none."""
        return self._incarnation

    async def open(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """Begin an incarnation at a committed state; with `announced`, go on with one whose executor was lost."""
        incarnation: int = params["incarnation"]
        announced: list[Announced] | None = None
        if params.get("announced") is not None:
            if incarnation == self._incarnation:
                return {}  # this executor was never lost, or has been told already
            announced = msgspec.convert(params["announced"], list[Announced])
        if incarnation < max(1, self._incarnation):
            here = self._incarnation or "none yet"
            raise StaleIncarnation(f"incarnation {incarnation} cannot be opened; the executor is in {here}")
        state = dict(params["state"] or {})
        counts = msgspec.convert(state.pop("counts", {}), Accounts)
        place = msgspec.convert(state, DataState)
        self._dispatcher.begin(incarnation, counts, adopt=announced is not None)
        self._incarnation = incarnation
        # The calls of the incarnation before have an error now, and give their prompts back before the place is set.
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await self._producer.reset()
        self._version = 0
        self._source.restore(place)
        for rollout in self._rollouts.values():
            self._release(rollout)
        self._rollouts.clear()
        async with self._finished:
            self._finished.notify_all()
        log.info("training incarnation %d begins at epoch %d, offset %d", incarnation, place.epoch, place.offset)
        for one in announced or []:
            log.info("rollout %d is put together again from what the workers hold", one.rollout_id)
            self._begin_call(one.rollout_id, self._adopt(one))
            self._source.restore(msgspec.convert(one.place, DataState))
        return {"prompts": len(self._prompts), "heldout": self._evaluator.heldout}

    async def generate(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """Generate a rollout; asked again, join the first call or return its result."""
        self._check(params)
        rollout_id: int = params["rollout_id"]
        if rollout_id in self._rollouts:
            return _plain(self._rollouts[rollout_id].result)
        call = self._calls.get(rollout_id)
        if call is None:
            call = self._begin_call(rollout_id, self._generate(rollout_id, params["weight_version"]))
        # Shielded: the caller may be gone and ask again.
        return _plain(await asyncio.shield(call))

    def _begin_call(self, rollout_id: int, work: Coroutine[Any, Any, RolloutResult]) -> asyncio.Task[RolloutResult]:
        call = asyncio.ensure_future(work)
        self._calls[rollout_id] = call
        call.add_done_callback(lambda _: self._calls.pop(rollout_id, None))
        return call

    async def _adopt(self, announced: Announced) -> RolloutResult:
        """A rollout of a lost executor: the same groups, from whoever holds them; only what nobody holds is done again.

        Raises:
            RolloutFailed: one of its groups failed; a rank may have pulled it, so no other can take its place.
        """
        self._published.tell(announced.weight_version)
        self._version = max(self._version, announced.weight_version)
        specs = [self._source.spec(name) for name in announced.groups]
        collector = Collector(f"rollout {announced.rollout_id}, announced again")
        orders = [self._order(spec, announced.weight_version) for spec in specs]
        self._dispatcher.dispatch(orders, collector, again=True)
        while collector.open:
            await progress(collector, self._dispatcher)
        if collector.dropped:
            raise RolloutFailed(f"{collector.what}: {dict(collector.dropped)}: {collector.last_failure}")
        groups = [collector.results[spec.id] for spec in specs]
        place = msgspec.convert(announced.place, DataState)
        produced = Produced(specs=specs, groups=groups, place=place, metrics={})
        return await self._hold(announced.rollout_id, announced.weight_version, produced, 0.0)

    async def _generate(self, rollout_id: int, weight_version: int) -> RolloutResult:
        if weight_version < self._version:
            raise ValueError(f"weight version {weight_version} after {self._version}; versions only grow")
        self._version = weight_version
        self._published.tell(weight_version)
        started = time.monotonic()
        if self._config.rollout.load_debug:
            produced, weight_version = load_rollout(Path(self._config.rollout.load_debug), rollout_id)
        else:
            produced = await self._producer.produce(rollout_id, weight_version)
        if self._config.rollout.save_debug:
            await asyncio.to_thread(save_rollout, self._run_dir / "rollouts", rollout_id, weight_version, produced)
        return await self._hold(rollout_id, weight_version, produced, time.monotonic() - started)

    async def _hold(self, rollout_id: int, weight_version: int, produced: Produced, seconds: float) -> RolloutResult:
        finished = self._finish(rollout_id, weight_version, produced, seconds)
        self._rollouts[rollout_id] = finished
        async with self._finished:
            self._finished.notify_all()
        return finished.result

    def _order(self, spec: GroupSpec, weight_version: int) -> RunGroup:
        return RunGroup(
            incarnation=self._incarnation,
            spec=spec,
            prompt=self._prompts[spec.prompt_index],
            samples=self._config.rollout.samples_per_prompt,
            weight_version=weight_version,
        )

    def _finish(self, rollout_id: int, weight_version: int, produced: Produced, seconds: float) -> _Rollout:
        gathered = Gathered.of(produced.groups)
        data = TrainData(gathered, rollout_id=rollout_id, weight_version=weight_version, train=self._config.train)
        ledger = [
            {
                "step": rollout_id,
                "group": spec.id,
                "prompt_index": spec.prompt_index,
                "epoch": spec.epoch,
                "samples": len(group),
                "digest": digest,
                "weight_versions": versions,
                "attempt": self._attempt,
            }
            for spec, group, digest, versions in zip(
                produced.specs, produced.groups, gathered.digests(), gathered.versions(), strict=True
            )
        ]
        metrics = {**rollout_metrics(gathered.batches, data.generations), **stat_metrics(produced.groups)}
        if seconds:
            metrics["longest_sample_tokens_per_s"] = metrics["response_tokens_max"] / seconds
        result = RolloutResult(
            rollout_id=rollout_id,
            groups=[spec.id for spec in produced.specs],
            reward_mean=float(np.mean(data.rewards)),
            tokens=data.total_response_tokens,
            metrics={**metrics, **produced.metrics},
            seconds=seconds,
            weight_version=weight_version,
            place=msgspec.to_builtins(produced.place),
        )
        return _Rollout(result, data, produced.specs, ledger, produced.place)

    async def evaluate(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """Answers to the prompts of all evaluated data sets; the accounts and the data order never see them."""
        self._check(params)
        self._version = max(self._version, params["weight_version"])
        self._published.tell(self._version)
        number = next(self._evaluations)
        return _plain(await self._evaluator.run(self._incarnation, number, params["weight_version"], params["limit"]))

    async def prepare_commit(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """What a commit after this rollout must hold."""
        self._check(params)
        if params["rollout_id"] in self._calls:
            await asyncio.shield(self._calls[params["rollout_id"]])
        rollouts = self._until(params["rollout_id"])
        committing = 0 if self._config.rollout.load_debug else sum(len(rollout.specs) for rollout in rollouts)
        accounts = self._dispatcher.accounts.settled(committing)
        counts = {name: count for name, count in accounts.to_dict().items() if name != "in_flight"}
        data = _plain(rollouts[-1].place)
        ledger = [line for rollout in rollouts for line in rollout.ledger]
        return _plain(CommitData(ledger=ledger, data_state={**data, "counts": counts}, counts=counts))

    def _until(self, rollout_id: int) -> list[_Rollout]:
        if rollout_id not in self._rollouts:
            raise UnknownRollout(f"rollout {rollout_id} is not held; uncommitted are {sorted(self._rollouts)}")
        return [rollout for number, rollout in sorted(self._rollouts.items()) if number <= rollout_id]

    async def committed(self, params: Any, frames: list[memoryview]) -> None:
        """The commit is durable; a repeat changes nothing."""
        self._check(params)
        for number in [number for number in self._rollouts if number <= params["rollout_id"]]:
            rollout = self._rollouts.pop(number)
            self._release(rollout)
            self._dispatcher.settle(rollout.result.groups, "committed")

    async def counts(self, params: Any, frames: list[memoryview]) -> dict[str, Any]:
        """The accounts, whose sum is checked."""
        self._check(params)
        return self._dispatcher.checked_accounts().to_dict(final=params["final"])

    # ------------------------------------------------------------------------------------------ ranks
    async def get(self, params: Any, frames: list[memoryview]) -> tuple[dict[str, Any], list[Buffer]]:
        """A rank's shard; waits for the rollout."""
        self._check(params)
        rollout_id, rank, size = params["rollout_id"], params["dp_rank"], params["dp_size"]
        async with self._finished:
            asked = self._incarnation
            ready = self._finished.wait_for(lambda: rollout_id in self._rollouts or self._incarnation != asked)
            try:
                await within(params["timeout_s"], ready)
            except asyncio.TimeoutError:
                raise UnknownRollout(
                    f"rollout {rollout_id} was not finished within {params['timeout_s']:g} s; held are "
                    f"{sorted(self._rollouts)}"
                ) from None
        self._check(params)
        rollout = self._rollouts[rollout_id]
        if rollout.data is None or rank in rollout.acked:
            raise UnknownRollout(f"rank {rank} has acknowledged rollout {rollout_id}; its shard is freed")
        if rollout.size not in (0, size) or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} asked for rollout {rollout_id}, split for {rollout.size or size}")
        if not rollout.size:
            if note := rollout.data.shares(size)[1]:
                log.warning("rollout %d: %s", rollout_id, note)
            rollout.size = size
        if rank not in rollout.parcels:
            shard = rollout.data.shard(rank, size)
            if shard.nbytes <= INLINE_BYTES:
                return {}, [shard.to_bytes()]
            remote = params.get("place", boot_id()) != boot_id()
            rollout.parcels[rank] = self._outbox.offer(shard, remote=remote)
        return _plain(rollout.parcels[rank]), []

    async def ack(self, params: Any, frames: list[memoryview]) -> None:
        """A rank is done with its shard; a repeat changes nothing."""
        self._check(params)
        rollout = self._rollouts.get(params["rollout_id"])
        if rollout is None:
            return
        rank = params["dp_rank"]
        rollout.acked.add(rank)
        if rank in rollout.parcels:
            self._outbox.release(rollout.parcels.pop(rank))
        if len(rollout.acked) == rollout.size:
            rollout.data = None

    def _release(self, rollout: _Rollout) -> None:
        for ref in rollout.parcels.values():
            self._outbox.release(ref)
        rollout.parcels.clear()


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain
