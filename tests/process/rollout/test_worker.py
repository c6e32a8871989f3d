"""A rollout worker against a scripted executor, over the real sockets, in one process."""

import asyncio
import contextlib

import msgspec
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout import worker as worker_module
from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.fetch import ParcelFetcher
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.rollout.work_messages import (
    FreeGroups,
    GroupsDone,
    GroupsReceived,
    RunGroup,
    SendInline,
    WorkBeat,
    WorkHello,
    WorkWelcome,
)
from miles_hpc.rollout.work_socket import WorkServer
from miles_hpc.rollout.worker import RolloutWorker
from miles_hpc.transport.batch import RolloutBatch
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.security import create_secrets
from miles_hpc.wire.worker_env import WorkerEnv

pytestmark = pytest.mark.process

ANY = HostAndPort("127.0.0.1", 0)


begun = []


async def generate(sample, context):
    """As many tokens as the prompt says; below 0 it waits to be cancelled, and takes no notice."""
    begun.append(sample.group)
    count = int(sample.prompt)
    if count < 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        count = -count
    sample.token_ids = list(range(count))
    sample.loss_mask = [1] * count
    sample.logprobs = [-1.0] * count
    sample.versions = [(1, 0, count)]
    sample.status = "completed"


class Book:
    def __init__(self, address):
        cell = CellAddrs(
            cell="executor-00000", generation=Generation(1, 1), node="n", ready=True, workers=[{"work": address}]
        )
        self.pools = {"executor": [cell]}

    def on_change(self, callback):
        return lambda: None


class Bench:
    """The worker under test, and an executor's end that keeps what it is told."""

    def __init__(self, run_dir, listen, rollout):
        create_secrets(run_dir, 1)
        self.messages = asyncio.Queue()
        self.server = WorkServer(ANY, run_dir, 1, lambda *heard: self.messages.put_nowait(heard))
        env = WorkerEnv(
            run_dir=run_dir,
            attempt=1,
            worker="rollout-worker-00000-00000",
            pool="rollout-worker",
            cell_index=0,
            worker_index=0,
            generation=Generation(1, 1),
            node="n",
            listen=listen,
            master={},
            cell_size=1,
        )
        config = msgspec.convert(
            {"reward": {"function": "exact_match"}, "rollout": {"concurrency": 8, **rollout}}, Config
        )
        self.worker = RolloutWorker(config, env, Book(self.server.address))
        self.peer = b""

    async def next(self, kind):
        while True:
            peer, message, parcel = await asyncio.wait_for(self.messages.get(), 10)
            if isinstance(message, kind):
                self.peer = peer
                return message, parcel

    def send(self, message):
        self.server.send(self.peer, message)

    def run(self, *orders):
        for name, tokens in orders:
            spec = GroupSpec(id=name, epoch=0, index=0, prompt_index=0)
            prompt = Prompt(prompt=str(tokens), label="")
            self.send(RunGroup(incarnation=1, spec=spec, prompt=prompt, samples=2, weight_version=1))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "generate_function", lambda path: generate)
    begun.clear()

    def go(body, listen, **rollout):
        async def main():
            made = Bench(tmp_path, listen, rollout)
            running = asyncio.ensure_future(made.worker.run())
            try:
                hello, _ = await made.next(WorkHello)
                assert hello.holds == []
                made.send(WorkWelcome(incarnation=1))
                await asyncio.wait_for(body(made), 20)
            finally:
                made.worker.stop()
                await running
                made.server.close()

        asyncio.run(main())

    return go


def test_small_groups_that_end_together_are_one_message(bench):
    async def body(made):
        made.run(("g1", 3), ("g2", 4), ("g3", 5))
        done, parcel = await made.next(GroupsDone)
        assert [(one.group, one.samples, one.reward_calls) for one in done.groups] == [
            ("g1", 2, 2),
            ("g2", 2, 2),
            ("g3", 2, 2),
        ]
        assert RolloutBatch.from_parcel(parcel).lengths.tolist() == [3, 3, 4, 4, 5, 5]
        made.run(("g2", 4))  # asked for again, by an executor that lost it: only that one comes
        done, parcel = await made.next(GroupsDone)
        assert [one.group for one in done.groups] == ["g2"] and len(RolloutBatch.from_parcel(parcel)) == 2

    bench(body, {})


def test_a_large_group_stays_in_shared_memory_until_it_is_committed(bench):
    async def body(made):
        made.run(("large", 50_000))
        done, parcel = await made.next(GroupsDone)
        assert parcel is None and made.worker._outbox.held_bytes >= done.ref.nbytes
        fetcher = ParcelFetcher()
        mapped = RolloutBatch.from_parcel(fetcher.view(done.ref))
        assert mapped.lengths.tolist() == [50_000, 50_000]
        made.send(SendInline(incarnation=1, groups=["large", "unknown"]))
        again, parcel = await made.next(GroupsDone)
        assert again.ref is None and RolloutBatch.from_parcel(parcel).token_ids[-1] == 49_999
        made.send(GroupsReceived(incarnation=1, groups=["large"]))
        made.send(FreeGroups(incarnation=1, groups=["large"], reason="superseded"))
        made.run(("next", 50_000))
        second, _ = await made.next(GroupsDone)
        assert made.worker._outbox.held_bytes == second.ref.nbytes
        assert second.ref.segment.nonce != done.ref.segment.nonce, "what was not committed may still be read"
        made.send(FreeGroups(incarnation=1, groups=["next"], reason="committed"))
        made.run(("third", 50_000))
        third, _ = await made.next(GroupsDone)
        assert third.ref.segment.nonce == second.ref.segment.nonce, "warm memory is used again"
        assert mapped.token_ids[-1] == 49_999
        fetcher.close()

    bench(body, {"bulk": ANY})


def test_a_group_that_was_freed_is_not_sent_when_its_function_ignores_the_cancellation(bench):
    async def body(made):
        made.run(("stubborn", -50_000))
        beat, _ = await made.next(WorkBeat)
        while beat.running != ["stubborn"]:
            beat, _ = await made.next(WorkBeat)
        assert [(stage.group, stage.stage) for stage in beat.oldest] == [("stubborn", "sample 0: prompt")]
        made.send(FreeGroups(incarnation=1, groups=["stubborn"], reason="superseded"))
        for name in ("next", "last"):
            made.run((name, 3))
            done, _ = await made.next(GroupsDone)
            assert [one.group for one in done.groups] == [name]
        assert made.worker._outbox.held == 0

    bench(body, {"bulk": ANY})


def test_what_was_not_acknowledged_is_sent_again_on_a_new_connection(bench):
    async def body(made):
        made.run(("small", 3), ("large", 50_000), ("kept", 4))
        heard = [(await made.next(GroupsDone))[0] for _ in range(2)]
        assert sorted(one.group for done in heard for one in done.groups) == ["kept", "large", "small"]
        made.send(GroupsReceived(incarnation=1, groups=["kept"]))
        made.run(("marker", 2))  # behind the acknowledgement
        await made.next(GroupsDone)
        made.worker._link.close()
        made.worker._on_down("cut by the test")
        hello, _ = await made.next(WorkHello)
        assert sorted(hello.holds) == ["kept", "large", "marker", "small"]
        made.send(WorkWelcome(incarnation=1))
        again = [(await made.next(GroupsDone))[0] for _ in range(2)]
        assert sorted(one.group for done in again for one in done.groups) == ["large", "marker", "small"]

    bench(body, {"bulk": ANY})


def test_received_groups_are_kept_up_to_keep_bytes_and_the_oldest_are_made_anew_when_asked_for(bench):
    async def body(made):
        for name in ("g1", "g2"):  # about 2000 bytes each
            made.run((name, 100))
            await made.next(GroupsDone)
        made.send(GroupsReceived(incarnation=1, groups=["g1", "g2"]))
        for name in ("g2", "g1"):
            made.run((name, 100))
            done, _ = await made.next(GroupsDone)
            assert [one.group for one in done.groups] == [name]
        assert begun == ["g1", "g1", "g2", "g2", "g1", "g1"]

    bench(body, {}, keep_bytes=3000)
