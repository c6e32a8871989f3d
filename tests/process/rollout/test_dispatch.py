"""The dispatcher against a scripted worker, over the real sockets, in one process."""

import asyncio

import msgspec
import numpy as np
import pytest
import zmq

from miles_hpc.rollout.accounts import Accounts
from miles_hpc.rollout.collect import Collector
from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.dispatch import Dispatcher
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.rollout.work_messages import (
    Done,
    FreeGroups,
    GroupsDone,
    GroupsReceived,
    RunGroup,
    SendInline,
    WorkBeat,
    WorkHello,
    WorkWelcome,
)
from miles_hpc.rollout.work_socket import WorkLink
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.carriers import Outbox
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.security import create_secrets

pytestmark = pytest.mark.process

ANY = HostAndPort("127.0.0.1", 0)


class Worker:
    """A link that keeps what it is told."""

    def __init__(self, address, run_dir, *, n=1, credits=2, holds=(), incarnation=0):
        self.messages = asyncio.Queue()
        self.down = asyncio.Queue()
        hello = WorkHello(
            worker="rollout-worker-00000-00000",
            generation=Generation(1, n),
            pid=1,
            credits=credits,
            holds=list(holds),
            incarnation=incarnation,
        )
        self.link = WorkLink(
            address,
            run_dir,
            1,
            on_up=lambda: self.link.send(hello),
            on_message=self.messages.put_nowait,
            on_down=self.down.put_nowait,
        )

    async def next(self):
        return await asyncio.wait_for(self.messages.get(), 5)

    def done(self, group, batch, incarnation=1):
        done = GroupsDone(incarnation=incarnation, groups=[Done(group, len(batch), 1, categories=["format"])])
        self.link.send(done, batch.packing().to_bytes())


class KeepingWorker(Worker):
    """One that keeps its groups' parcels in shared memory."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.outbox = Outbox(ANY)

    def offer(self, group, **elsewhere):
        made = batch()
        ref = self.outbox.offer(made.packing())
        ref = msgspec.structs.replace(ref, **{name: change(ref) for name, change in elsewhere.items()})
        self.link.send(GroupsDone(incarnation=1, groups=[Done(group, len(made))], ref=ref))

    def close(self):
        self.outbox.close()
        self.link.close()


def on_another_node(ref):
    return msgspec.structs.replace(ref.segment, boot_id="another")


def batch(samples=1, logprob=-1.0):
    return RolloutBatch.pack(
        [SampleArrays([1, 2], [0, 1], [0.0, logprob], 1.0, sample_index=i) for i in range(samples)]
    )


def order(group, incarnation=1):
    spec = GroupSpec(id=group, epoch=0, index=0, prompt_index=0)
    return RunGroup(incarnation=incarnation, spec=spec, prompt=Prompt(prompt="p"), samples=1, weight_version=1)


def scenario(tmp_path, body, lease_s=10.0):
    async def main():
        create_secrets(tmp_path, 1)
        dispatcher = Dispatcher(ANY, tmp_path, 1, lease_s=lease_s)
        running = asyncio.ensure_future(dispatcher.run())
        try:
            dispatcher.begin(1, Accounts())
            await asyncio.wait_for(body(dispatcher, running), 20)
            dispatcher.checked_accounts()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            dispatcher.close()

    asyncio.run(main())


def test_a_group_goes_out_and_comes_back_and_is_freed_when_committed(tmp_path):
    async def body(dispatcher, running):
        worker, collector = Worker(dispatcher.address, tmp_path), Collector("r")
        assert await worker.next() == WorkWelcome(incarnation=1)
        dispatcher.dispatch([order("g1")], collector)
        assert await worker.next() == order("g1")
        for _ in range(2):  # a repeat is acknowledged again, and used once
            worker.done("g1", batch())
            assert await worker.next() == GroupsReceived(incarnation=1, groups=["g1"])
        assert list(collector.results) == ["g1"] and collector.reward_calls == 1
        assert collector.results["g1"].categories == ["format"]
        dispatcher.settle(["g1"], "committed")
        assert await worker.next() == FreeGroups(incarnation=1, groups=["g1"], reason="committed")
        assert dispatcher.accounts.to_dict(final=True) == {
            "dispatched": 1,
            "committed": 1,
            "returned": 0,
            "dropped": {},
        }
        worker.link.close()

    scenario(tmp_path, body)


def test_a_parcel_that_stays_at_its_worker_is_mapped_or_pulled_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_hpc.rollout.fetch._PULL_S", 0.2)

    async def body(dispatcher, running):
        worker, collector = KeepingWorker(dispatcher.address, tmp_path), Collector("r")
        dispatcher.dispatch([order("g1"), order("g2")], collector)
        assert [await worker.next() for _ in range(3)] == [WorkWelcome(incarnation=1), order("g1"), order("g2")]
        worker.offer("g1")
        assert await worker.next() == GroupsReceived(incarnation=1, groups=["g1"])
        worker.offer("g2", segment=on_another_node)
        assert await worker.next() == GroupsReceived(incarnation=1, groups=["g2"])
        for name in ("g1", "g2"):
            assert collector.results[name].batch.token_ids.tolist() == [1, 2]
        dispatcher.settle(["g1", "g2"], "committed")
        await worker.next()
        dispatcher.dispatch([order("g3")], collector)
        assert await worker.next() == order("g3")
        # Nothing answers there: the worker sends it on the connection that it has.
        worker.offer("g3", segment=on_another_node, address=lambda ref: HostAndPort("127.0.0.1", 9))
        assert await worker.next() == SendInline(incarnation=1, groups=["g3"])
        worker.done("g3", batch())
        assert await worker.next() == GroupsReceived(incarnation=1, groups=["g3"])
        worker.close()

    scenario(tmp_path, body)


def test_groups_of_one_parcel_are_taken_one_by_one(tmp_path):
    async def body(dispatcher, running):
        worker, collector = Worker(dispatcher.address, tmp_path, credits=4), Collector("r")
        dispatcher.dispatch([order(name) for name in ("g1", "g2", "g3", "g4")], collector)
        for _ in range(5):
            await worker.next()
        parts = [batch(), batch(samples=2), batch(logprob=float("inf"))]
        done = GroupsDone(incarnation=1, groups=[Done(f"g{n + 1}", len(part), 1) for n, part in enumerate(parts)])
        worker.link.send(done, RolloutBatch.concat(parts).packing().to_bytes())
        freed = [(await worker.next()).groups for _ in range(2)]
        assert freed == [["g2"], ["g3"]] and collector.dropped == {"invalid_sample": 2}
        assert await worker.next() == GroupsReceived(incarnation=1, groups=["g1"])
        worker.link.send(GroupsDone(incarnation=1, groups=[Done("g4", 1)]), b"no parcel at all")
        assert (await worker.next()).groups == ["g4"]
        assert list(collector.results) == ["g1"] and collector.open == set()

    scenario(tmp_path, body)


@pytest.mark.parametrize(
    "bad, text",
    [(batch(samples=2), "has 2 samples; expected 1"), (batch(logprob=float("nan")), "sample 0 has a log-prob")],
)
def test_a_group_that_cannot_be_trained_on_is_dropped(tmp_path, bad, text):
    async def body(dispatcher, running):
        worker, collector = Worker(dispatcher.address, tmp_path), Collector("r")
        dispatcher.dispatch([order("g1")], collector)
        assert [await worker.next(), await worker.next()] == [WorkWelcome(incarnation=1), order("g1")]
        worker.done("g1", bad)
        assert await worker.next() == FreeGroups(incarnation=1, groups=["g1"], reason="dropped")
        assert collector.dropped == {"invalid_sample": 1} and text in collector.last_failure

    scenario(tmp_path, body)


def test_a_group_with_other_columns_than_those_before_it_is_dropped_not_the_rollout(tmp_path):
    async def body(dispatcher, running):
        worker, collector = Worker(dispatcher.address, tmp_path), Collector("r")
        dispatcher.dispatch([order("g1"), order("g2")], collector)
        assert [await worker.next() for _ in range(3)] == [WorkWelcome(incarnation=1), order("g1"), order("g2")]
        experts = {"experts": np.zeros((2, 4), np.int32)}
        worker.done("g1", RolloutBatch.pack([SampleArrays([1, 2], [0, 1], [0.0, -1.0], 1.0, extra=experts)]))
        assert await worker.next() == GroupsReceived(incarnation=1, groups=["g1"])
        worker.done("g2", batch())
        assert await worker.next() == FreeGroups(incarnation=1, groups=["g2"], reason="dropped")
        assert list(collector.results) == ["g1"] and collector.dropped == {"invalid_sample": 1}
        assert "has the extra columns {}; those of the groups before it are {'experts': 'int32[4]'}" in (
            collector.last_failure
        )

    scenario(tmp_path, body)


def test_work_of_another_incarnation_is_freed_not_used(tmp_path):
    async def body(dispatcher, running):
        worker = Worker(dispatcher.address, tmp_path, holds=["g1"], incarnation=7)
        assert await worker.next() == WorkWelcome(incarnation=1)
        worker.done("g1", batch(), incarnation=7)
        assert await worker.next() == FreeGroups(incarnation=7, groups=["g1"], reason="superseded")

    scenario(tmp_path, body)


def test_a_worker_that_was_started_again_or_left_the_address_book_is_lost(tmp_path):
    def book(*generations):
        return {
            "rollout-worker": [
                CellAddrs(cell="rollout-worker-00000", generation=g, node="n", ready=True, workers=[{}])
                for g in generations
            ]
        }

    async def body(dispatcher, running):
        worker, collector = Worker(dispatcher.address, tmp_path), Collector("r")
        dispatcher.dispatch([order("g1")], collector)
        assert [await worker.next(), await worker.next()] == [WorkWelcome(incarnation=1), order("g1")]
        dispatcher.on_pools(book())
        assert dispatcher.where("g1") == "leased at rollout-worker-00000-00000", (
            "a book that never had it proves nothing"
        )
        dispatcher.on_pools(book(Generation(1, 1)))
        dispatcher.on_pools(book())
        assert dispatcher.where("g1") == "no rollout worker is connected"
        second = Worker(dispatcher.address, tmp_path, n=2)
        assert [await second.next(), await second.next()] == [WorkWelcome(incarnation=1), order("g1")]
        dispatcher.on_pools(book(Generation(1, 3)))
        assert dispatcher.where("g1") == "no rollout worker is connected"
        assert dispatcher.accounts.dropped == {"lost": 2}

    scenario(tmp_path, body)


def test_what_does_not_decode_is_dropped_and_the_others_are_served(tmp_path):
    async def body(dispatcher, running):
        worker = Worker(dispatcher.address, tmp_path)
        await worker.next()
        worker.link._pump.send([b"\xc1 garbage"])
        worker.link._pump.send([b""])
        worker.link.send(WorkBeat(incarnation=1))
        await worker.next()
        assert dispatcher._server.malformed == 2

    scenario(tmp_path, body)


def test_a_key_of_another_attempt_is_refused_by_name(tmp_path):
    async def body(dispatcher, running):
        (tmp_path / "other").mkdir()
        create_secrets(tmp_path / "other", 1)
        server = tmp_path / "secrets" / "attempt-1" / "data.json"
        (tmp_path / "other" / "secrets" / "attempt-1" / "data.json").write_bytes(server.read_bytes())
        stranger = Worker(dispatcher.address, tmp_path / "other")
        assert "does not know this process's key" in await asyncio.wait_for(stranger.down.get(), 5)
        assert stranger.messages.empty() and not stranger.link.send(WorkBeat(incarnation=1))

    scenario(tmp_path, body)


def test_a_bug_in_the_handling_of_a_message_ends_the_dispatcher(tmp_path):
    async def body(dispatcher, running):
        worker, collector = Worker(dispatcher.address, tmp_path), Collector("r")
        collector.on_result = None
        dispatcher.dispatch([order("g1")], collector)
        await worker.next()
        worker.done("g1", batch())
        with pytest.raises(TypeError):
            await running

    scenario(tmp_path, body)


def test_an_address_in_use_is_refused(tmp_path):
    async def body(dispatcher, running):
        with pytest.raises(OSError, match="cannot listen on") as caught:
            Dispatcher(dispatcher.address, tmp_path, 1, lease_s=1.0)
        assert caught.value.errno == zmq.EADDRINUSE

    scenario(tmp_path, body)
