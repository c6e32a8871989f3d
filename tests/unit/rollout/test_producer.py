"""mode async against workers that finish when the test says so: late groups are counted, and nobody starves."""

import asyncio

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout.accounts import Accounts
from miles_hpc.rollout.board import Board, Run
from miles_hpc.rollout.collect import RolloutFailed
from miles_hpc.rollout.data import DataSource, Prompt
from miles_hpc.rollout.groups import groups_of
from miles_hpc.rollout.producer import AsyncProducer
from miles_hpc.rollout.work_messages import RunGroup
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit

BATCH, ROWS = 4, 1000
WORKER = b"w"
LATE = ("e00000-i000000002", "e00000-i000000005")


class Workers:
    """Stands where the dispatcher stands, on the real board. `late` groups wait until they are finished by hand."""

    def __init__(self):
        self.board = Board(10.0, Accounts())
        self.board.on_hello(WORKER, "worker", Generation(1, 1), 10_000, [], 0.0)
        self.version = 1
        self.late = lambda name: False
        self.begun_at = {}
        self.collectors = {}
        self.dropped = []

    def dispatch(self, orders, collector):
        names = [order.spec.id for order in orders]
        collector.expect(names)
        for action in self.board.add(names):
            assert isinstance(action, Run)
        for name in names:
            self.begun_at[name], self.collectors[name] = self.version, collector
            if not self.late(name):
                self.finish(name)

    def finish(self, name):
        (group,) = groups_of(RolloutBatch.pack([arrays(self.begun_at[name])]), [1])
        assert self.board.on_done(WORKER, [name], 0.0)[0] == [name]
        self.collectors[name].on_result(name, group, 0)

    def settle(self, names, how, reason=""):
        if how == "dropped":
            self.dropped += names
        self.board.settle(names, how, reason)

    def where(self, name):
        return "nowhere"


def arrays(version):
    return SampleArrays([1], [1], [-1.0], 1.0, versions=[(version, 0, 1)])


def make(policy, **rollout):
    settings = {"batch_size": BATCH, "samples_per_prompt": 1, "max_staleness": 1, "on_stale": policy, **rollout}
    config = msgspec.convert({"mode": "async", "rollout": settings}, Config)
    workers, source = Workers(), DataSource(ROWS, seed=1, shuffle=False)

    def order(spec, version):
        return RunGroup(incarnation=1, spec=spec, prompt=Prompt(prompt="p"), samples=1, weight_version=version)

    return AsyncProducer(config, source, ROWS, workers, order), workers


def scenario(body):
    asyncio.run(asyncio.wait_for(body(), 20))


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_groups_that_come_too_late_are_counted_and_others_take_their_place(policy):
    producer, workers = make(policy)

    async def body():
        committed, place = [], None
        workers.late = lambda name: workers.version == 1 and name in LATE
        for rollout in range(1, 9):
            workers.version = rollout
            produced = await producer.produce(rollout, rollout)
            committed += [spec.id for spec in produced.specs]
            place = produced.place
            assert len(produced.specs) == BATCH and produced.metrics["staleness_max"] <= 1
            workers.board.settle([spec.id for spec in produced.specs], "committed")
            accounts = workers.board.accounts
            accounts.check(workers.board.open_dispatches)
            # What is begun and not dropped is within the bound.
            begun = accounts.dispatched - accounts.returned - sum(accounts.dropped.values())
            assert begun <= (1 + rollout) * BATCH
            if rollout == 4:
                for name in LATE:
                    workers.finish(name)
        waiting = [group.id for group in place.buffer]
        order = [f"e00000-i{index:09d}" for index in range(place.offset)]
        assert sorted([*committed, *waiting, *workers.dropped]) == order  # each prompt has one fate, and none is lost
        assert workers.board.accounts.dropped == ({"stale": 2} if policy == "drop" else {})
        assert len(workers.dropped) == (2 if policy == "drop" else 0)
        if policy == "retry":
            assert workers.board.accounts.returned == 2 and {*LATE} <= {*committed}
        await producer.reset()

    scenario(body)


def test_a_group_that_comes_late_and_not_too_late_is_taken_before_fresher_ones():
    producer, workers = make("drop", max_staleness=2)

    async def body():
        workers.late = lambda name: name in LATE
        for rollout in (1, 2):
            workers.version = rollout
            produced = await producer.produce(rollout, rollout)
            assert not {*LATE} & {spec.id for spec in produced.specs}
        # Six others wait already when the two come, four of them of a newer version.
        for name in LATE:
            workers.finish(name)
        taken = {spec.id for spec in (await producer.produce(3, 2)).specs}
        assert {*LATE} <= taken and workers.dropped == []
        await producer.reset()

    scenario(body)


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_a_run_whose_groups_are_all_too_old_ends_with_the_reason_instead_of_spinning(policy):
    producer, workers = make(policy, max_filtered_batches=3)

    async def body():
        await producer.produce(1, 1)
        await producer.produce(2, 2)
        # The engines keep version 1, whatever is published.
        with pytest.raises(RolloutFailed, match=r"2\d groups were more than .* behind 9, at last e0"):
            await producer.produce(3, 9)
        accounts = workers.board.accounts
        accounts.check(workers.board.open_dispatches)
        assert (accounts.returned if policy == "retry" else accounts.dropped["stale"]) > 20
        await producer.reset()

    scenario(body)
