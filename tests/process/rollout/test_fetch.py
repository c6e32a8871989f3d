"""Parcels from another node whose bulk port does not answer, and does again."""

import asyncio
import contextlib
import socket

import msgspec
import pytest

from miles_hpc.rollout.fetch import ParcelFetcher
from miles_hpc.transport.batch import RolloutBatch, SampleArrays
from miles_hpc.transport.bulk import BulkRefused, BulkTimeout, ParcelGone
from miles_hpc.transport.carriers import Outbox
from miles_hpc.wire.address import HostAndPort

pytestmark = pytest.mark.process

PULL_S = 1.0


class Wire:
    """A port that takes no connection until `answer`; then it leads to the outbox's."""

    def __init__(self, leads_to):
        self.leads_to = leads_to
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.address = HostAndPort("127.0.0.1", self.socket.getsockname()[1])

    async def answer(self):
        return await asyncio.start_server(self.relay, sock=self.socket)

    async def relay(self, reader, writer):
        back, forth = await asyncio.open_connection(self.leads_to.host, self.leads_to.port)

        async def pump(source, sink):
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, forth), pump(back, writer))


def scenario(monkeypatch, silent_s, body):
    monkeypatch.setattr("miles_hpc.rollout.fetch._PULL_S", PULL_S)
    monkeypatch.setattr("miles_hpc.rollout.fetch._SILENT_S", silent_s)

    async def main():
        batch = RolloutBatch.pack([SampleArrays([1, 2], [0, 1], [0.0, -1.0], 1.0)])
        outbox, fetcher = Outbox(HostAndPort("127.0.0.1", 0)), ParcelFetcher()
        ref = outbox.offer(batch.packing())
        wire = Wire(ref.address)
        silent = msgspec.structs.replace(ref, address=wire.address)
        try:
            with pytest.raises(BulkTimeout):
                await fetcher.pull(silent)
            await body(fetcher, silent, wire)
        finally:
            fetcher.close()
            outbox.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_port_that_was_silent_is_asked_again_once_its_time_is_over(monkeypatch):
    async def body(fetcher, ref, wire):
        monkeypatch.setattr("miles_hpc.rollout.fetch._PULL_S", 30.0)
        server = await wire.answer()
        found = RolloutBatch.from_parcel(await fetcher.pull(ref))
        assert found.token_ids.tolist() == [1, 2]
        # It answers: all is as if it always had, so parcels wait for each other and none is refused.
        monkeypatch.setattr("miles_hpc.rollout.fetch._SILENT_S", 1000.0)
        assert len(await asyncio.gather(fetcher.pull(ref), fetcher.pull(ref))) == 2
        server.close()

    scenario(monkeypatch, 0.0, body)


@pytest.mark.parametrize("refused", [False, True])
def test_a_silent_port_that_refuses_a_parcel_is_silent_no_more(monkeypatch, refused):
    async def body(fetcher, ref, wire):
        monkeypatch.setattr("miles_hpc.rollout.fetch._PULL_S", 30.0)
        monkeypatch.setattr("miles_hpc.rollout.fetch._SILENT_S", 1000.0)
        server = await wire.answer()
        if refused:  # the port says no to this key; whatever it says, it is there
            fetcher._silent = {(ref.address, b"another"): 0.0}
            with pytest.raises(BulkRefused):
                await fetcher.pull(msgspec.structs.replace(ref, key=b"another"))
        else:
            with pytest.raises(ParcelGone):
                await fetcher.pull(msgspec.structs.replace(ref, id=bytes(16)))
        assert not fetcher._silent
        assert RolloutBatch.from_parcel(await fetcher.pull(ref)).token_ids.tolist() == [1, 2]
        server.close()

    scenario(monkeypatch, 0.0, body)


def test_until_then_and_while_one_parcel_tries_the_others_are_refused_at_once(monkeypatch):
    async def body(fetcher, ref, wire):
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(BulkTimeout, match="did not answer before"):
            await fetcher.pull(ref)
        assert loop.time() - began < PULL_S
        for port in fetcher._silent:
            fetcher._silent[port] = began  # its time is over
        tried, refused = await asyncio.gather(fetcher.pull(ref), fetcher.pull(ref), return_exceptions=True)
        assert "did not answer before" not in str(tried) and "did not answer before" in str(refused)
        assert isinstance(tried, BulkTimeout) and isinstance(refused, BulkTimeout)

    scenario(monkeypatch, 1000.0, body)
