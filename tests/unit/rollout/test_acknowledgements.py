"""Which groups an executor says it has: a worker sends no acknowledged one again of itself."""

import asyncio
from pathlib import Path

import pytest

from miles_hpc.rollout import dispatch
from miles_hpc.rollout.accounts import Accounts
from miles_hpc.rollout.collect import Collector
from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.rollout.work_messages import Done, GroupsDone, GroupsReceived, RunGroup, WorkHello
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation

pytestmark = pytest.mark.unit


class Server:
    """Keeps what is sent."""

    def __init__(self, listen, run_dir, attempt, on_message):
        self.on_message = on_message
        self.sent = []

    def send(self, peer, message):
        self.sent.append((peer, message))

    def close(self):
        pass


def test_a_group_of_a_worker_without_a_seat_is_not_acknowledged(monkeypatch):
    monkeypatch.setattr(dispatch, "WorkServer", Server)
    parcel = memoryview(RolloutBatch.pack([SampleArrays([1], [1], [-1.0], 1.0)]).packing().to_bytes())
    done = GroupsDone(incarnation=1, groups=[Done("g1", 1)])
    spec = GroupSpec(id="g1", epoch=0, index=0, prompt_index=0)

    async def body():
        dispatcher = dispatch.Dispatcher(HostAndPort("127.0.0.1", 0), Path(), 1, lease_s=10.0)
        server, collector = dispatcher._server, Collector("r")
        dispatcher.begin(1, Accounts())
        order = RunGroup(incarnation=1, spec=spec, prompt=Prompt(prompt="p"), samples=1, weight_version=1)
        dispatcher.dispatch([order], collector)
        server.on_message(b"w", done, parcel)
        assert server.sent == [] and collector.results == {}
        server.on_message(b"w", WorkHello(worker="w", generation=Generation(1, 1), pid=1, credits=1), None)
        server.on_message(b"w", done, parcel)
        assert server.sent[-1] == (b"w", GroupsReceived(incarnation=1, groups=["g1"])) and "g1" in collector.results
        dispatcher.close()

    asyncio.run(asyncio.wait_for(body(), 20))
