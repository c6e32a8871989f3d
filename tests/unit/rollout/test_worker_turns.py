"""What a worker does with its groups between two turns of its loop, without any connection."""

import asyncio
import types

import msgspec
import numpy as np
import pytest

from miles_hpc.config.schema import Config
from miles_hpc.rollout import worker as worker_module
from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.rollout.work_messages import FreeGroups, GroupsDone, GroupsReceived, RunGroup, WorkWelcome, encode
from miles_hpc.rollout.worker import RolloutWorker
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.worker_env import WorkerEnv

pytestmark = pytest.mark.unit


async def fill(sample, context):
    sample.token_ids, sample.loss_mask, sample.logprobs = [1, 2], [0, 1], [0.0, -1.0]
    sample.versions, sample.status = [(1, 1, 2)], "completed"


class Link:
    """Keeps what is sent, if it can be written."""

    def __init__(self):
        self.sent = []

    def send(self, message, parcel=None):
        encode(message)
        self.sent.append(message)

    def groups(self):
        return [done.group for message in self.sent if isinstance(message, GroupsDone) for done in message.groups]


def order(name):
    spec = GroupSpec(id=name, epoch=0, index=0, prompt_index=0)
    return RunGroup(incarnation=1, spec=spec, prompt=Prompt(prompt="p", label=""), samples=1, weight_version=1)


def scenario(tmp_path, monkeypatch, generate, body, **sections):
    monkeypatch.setattr(worker_module, "generate_function", lambda path: generate)
    config = msgspec.convert({"reward": {"function": "exact_match"}, **sections}, Config)
    env = WorkerEnv(
        run_dir=tmp_path,
        attempt=1,
        worker="rollout-worker-00000-00000",
        pool="rollout-worker",
        cell_index=0,
        worker_index=0,
        generation=Generation(1, 1),
        node="n",
        listen={},
        master={},
        cell_size=1,
    )

    async def main():
        worker = RolloutWorker(config, env, types.SimpleNamespace(pools={}, on_change=None))
        worker._link = Link()
        worker._on_message(WorkWelcome(incarnation=1))
        await body(worker, worker._link)
        for _, task in worker._running.values():
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(true):
    while not true():  # noqa: ASYNC110 - the bound is that of the scenario
        await asyncio.sleep(0)


def test_a_kept_group_that_an_executor_asks_for_counts_as_unsent_until_that_one_has_it(tmp_path, monkeypatch):
    async def body(worker, link):
        worker._on_message(order("g1"))
        await until(link.groups)
        worker._on_message(GroupsReceived(incarnation=1, groups=["g1"]))
        worker._on_message(order("g1"))
        await until(lambda: link.groups() == ["g1"] * 2)
        # Lost with the connection, and found by the next welcome.
        worker._on_down("")
        worker._link = second = Link()
        worker._on_message(WorkWelcome(incarnation=1))
        for _ in range(3):
            await asyncio.sleep(0)
        assert second.groups() == ["g1"]

    scenario(tmp_path, monkeypatch, fill, body)


def test_a_worker_that_cannot_send_a_group_ends_with_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_hpc.rollout.group_run.group_stats", lambda samples: {"n": np.float64(1.5)})

    async def body(worker, link):
        worker._on_message(order("g1"))
        await until(lambda: worker._failure is not None)
        assert isinstance(worker._failure, TypeError) and link.groups() == []

    scenario(tmp_path, monkeypatch, fill, body)


def test_a_worker_that_cannot_pack_a_group_ends_with_the_error(tmp_path, monkeypatch):
    def broken(self, done, samples):
        raise RuntimeError("no room")

    monkeypatch.setattr(RolloutWorker, "_packed", broken)

    async def body(worker, link):
        worker._on_message(order("g1"))
        await until(lambda: worker._failure is not None)
        assert str(worker._failure) == "no room"

    scenario(tmp_path, monkeypatch, fill, body)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_group_that_its_function_cancels_has_failed_and_one_that_is_freed_is_gone(tmp_path, monkeypatch, samples):
    begun = []

    async def cancels(sample, context):
        begun.append(sample.group)
        if sample.group == "freed":
            await asyncio.Event().wait()
        raise asyncio.CancelledError

    async def body(worker, link):
        worker._on_message(msgspec.structs.replace(order("g1"), samples=samples))
        await until(lambda: link.sent)
        (failed,) = link.sent
        assert (failed.group, failed.reason) == ("g1", "generation_failed") and "from inside" in failed.text
        assert worker._running == {} and worker._failure is None
        worker._on_message(order("freed"))
        await until(lambda: "freed" in begun)
        _, task = worker._running["freed"]
        worker._on_message(FreeGroups(incarnation=1, groups=["freed"], reason="superseded"))
        await asyncio.wait([task])
        assert task.cancelled() and link.sent == [failed] and list(worker._kept) == ["g1"]

    scenario(tmp_path, monkeypatch, cancels, body)
