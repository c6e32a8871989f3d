"""Parcels between processes: shared memory, TCP, files; breaks, wrong keys, and memory that is used again."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from miles_hpc.transport import bulk
from miles_hpc.transport.bulk import PART, BulkClient, BulkRefused, BulkTimeout, ParcelGone
from miles_hpc.transport.carriers import Inbox, Outbox, map_parcel, write_parcel
from miles_hpc.transport.columns import SchemaError
from miles_hpc.transport.parcel import Packing, read_parcel
from miles_hpc.transport.segments import SegmentMaps, SegmentUnreachable
from miles_hpc.wire.address import HostAndPort

pytestmark = pytest.mark.process

ANY = HostAndPort("127.0.0.1", 0)
HERE = Path(__file__).parent


def packing(values, number=0):
    return Packing("test", {"values": np.asarray(values, np.int32)}, {"number": number})


@pytest.fixture
def outbox():
    made = Outbox(ANY)
    yield made
    made.close()


@pytest.fixture
def consume():
    started = []

    def start(carrier):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "consumer.py"), carrier],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)

        def fetch(ref):
            process.stdin.write(msgspec.json.encode(ref).decode() + "\n")
            process.stdin.flush()
            return process.stdout.readline().split()

        return process, fetch

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_another_process_gets_parcels_read_only_and_again_until_they_are_released(outbox, consume, carrier):
    _, fetch = consume(carrier)
    values = np.arange(3 * PART // 4 + 7)
    ref = outbox.offer(packing(values, 5))
    expected = ["5", str(values.sum()), "False"]
    assert fetch(ref) == expected and fetch(ref) == expected
    # One that died and came back gets the same again.
    _, again = consume(carrier)
    assert again(ref) == expected
    outbox.release(ref)
    assert outbox.held_bytes == 0


def test_memory_is_used_again(outbox, consume):
    _, fetch = consume("shm")
    inodes = set()
    for number in range(5):
        ref = outbox.offer(packing(np.full(100_000, number), number))
        assert fetch(ref)[:2] == [str(number), str(100_000 * number)]
        outbox.release(ref)
        inodes.add(ref.segment.inode)
    assert len(inodes) == 1


def test_a_descriptor_that_names_something_else_by_now_is_not_believed(outbox):
    ref = outbox.offer(packing([1, 2, 3])).segment
    maps = SegmentMaps()
    assert maps.view(ref, 10)
    with pytest.raises(SegmentUnreachable, match="another node"):
        SegmentMaps().view(msgspec.structs.replace(ref, boot_id="other"), 10)
    with pytest.raises(SegmentUnreachable, match="another file by now"):
        SegmentMaps().view(msgspec.structs.replace(ref, inode=ref.inode + 1), 10)
    with pytest.raises(SegmentUnreachable, match="another segment by now"):
        SegmentMaps().view(msgspec.structs.replace(ref, nonce=b"x" * 16), 10)
    with pytest.raises(SegmentUnreachable, match="cannot be reached"):
        SegmentMaps().view(msgspec.structs.replace(ref, nonce=b"y" * 16, fd=9999), 10)


def test_without_shared_memory_the_same_parcel_comes_over_tcp(outbox):
    values = np.arange(PART)
    ref = outbox.offer(packing(values))
    far = msgspec.structs.replace(ref, segment=msgspec.structs.replace(ref.segment, boot_id="another node"))
    inbox = Inbox()
    columns, _ = read_parcel("test", inbox.fetch(far, 20))
    np.testing.assert_array_equal(columns["values"], values)
    inbox.close()


def test_a_parcel_for_another_node_is_laid_out_while_it_is_pulled(outbox):
    parts = [np.full(PART // 8, number, np.int32) for number in range(9)]
    ref = outbox.offer(Packing("test", {"values": parts}), remote=True)
    assert ref.segment is None and outbox._held[ref.id]._written == 0
    for _ in range(2):  # what is laid out is kept for those who pull again
        inbox = Inbox()
        columns, _ = read_parcel("test", inbox.fetch(ref, 20))
        np.testing.assert_array_equal(columns["values"], np.concatenate(parts))
        inbox.close()
    assert outbox._held[ref.id]._writing is None
    with pytest.raises(SegmentUnreachable, match="for one of another node"):
        Inbox("shm").fetch(ref, 1)
    outbox.release(ref)
    inbox = Inbox()
    with pytest.raises(ParcelGone):
        inbox.fetch(ref, 10)
    inbox.close()


def test_a_key_that_is_wrong_and_a_parcel_that_is_gone_are_told_apart(outbox):
    ref = outbox.offer(packing([1]))
    stranger = BulkClient(outbox.address, b"wrong" * 8)
    with pytest.raises(BulkRefused, match="does not accept this key"):
        stranger.pull(ref.id, memoryview(bytearray(ref.nbytes)), 10)
    stranger.close()
    outbox.release(ref)
    client = BulkClient(outbox.address, ref.key)
    with pytest.raises(ParcelGone):
        client.pull(ref.id, memoryview(bytearray(ref.nbytes)), 10)
    client.close()


def test_who_does_not_prove_the_key_gets_nothing(outbox):
    ref = outbox.offer(packing(np.arange(1000)))
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(outbox.address.zmq)
        socket.send_multipart([b"pull", ref.id, b"\0\0\0\0", b"\1\0\0\0"])
        assert not socket.poll(300)  # a stranger is not even answered
        socket.send(b"hello")
        assert socket.poll(5000) and socket.recv_multipart()[0] == b"nonce"
        socket.send_multipart([b"pull", ref.id, b"\0\0\0\0", b"\1\0\0\0"])
        assert socket.poll(5000) and socket.recv_multipart() == [b"refused"]
        for junk in ([b"pull"], [b"proof"], [b""], [b"credit", ref.id]):
            socket.send_multipart(junk)
    finally:
        socket.close()
    assert bytes(Inbox("tcp").fetch(ref, 10)) == bytes(Inbox("shm").fetch(ref, 10))


class Cut:
    """A TCP relay that cuts each connection after so many bytes of answers."""

    def __init__(self, target, after):
        import socket

        self._target, self._after = target, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = HostAndPort("127.0.0.1", self._listener.getsockname()[1])
        self.cuts = 0
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        import socket

        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [near, far]
            threading.Thread(target=self._copy, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, self._after), daemon=True).start()

    def _copy(self, source, target, limit):
        done = 0
        try:
            while data := source.recv(65536):
                target.sendall(data)
                done += len(data)
                if limit is not None and done > limit:
                    self.cuts += 1
                    self._after += limit
                    break
        except OSError:
            pass
        for one in (source, target):
            one.close()

    def close(self):
        for one in (self._listener, *self._sockets):
            one.close()


def test_a_connection_that_breaks_goes_on_from_the_last_part(outbox, monkeypatch):
    monkeypatch.setattr(bulk, "_RETRY_S", 0.5)
    values = np.arange(6 * PART)
    ref = outbox.offer(packing(values))
    relay = Cut(outbox.address, after=4 * PART)
    client = BulkClient(relay.address, ref.key)
    memory = bytearray(ref.nbytes)
    client.pull(ref.id, memoryview(memory), 60)
    np.testing.assert_array_equal(read_parcel("test", memory)[0]["values"], values)
    assert relay.cuts >= 1 and client.connections >= 2
    client.close()
    relay.close()


def test_a_producer_that_is_not_there_is_named_at_the_deadline():
    client = BulkClient(HostAndPort("127.0.0.1", 1), b"k")
    with pytest.raises(BulkTimeout, match=r"0 of 1 parts came from 127\.0\.0\.1:1 within 0\.3 s"):
        client.pull(b"x", memoryview(bytearray(10)), 0.3)
    client.close()


def test_a_file_holds_a_parcel_whole_or_not_at_all(tmp_path):
    path = tmp_path / "0001.parcel"
    write_parcel(path, packing(np.arange(10)))
    assert list(tmp_path.iterdir()) == [path]
    assert read_parcel("test", map_parcel(path))[0]["values"].tolist() == list(range(10))
    path.write_bytes(path.read_bytes()[:70])
    with pytest.raises(SchemaError):
        read_parcel("test", map_parcel(path))


def test_views_outlive_the_outbox():
    outbox = Outbox(ANY)
    ref = outbox.offer(packing(np.arange(100)))
    view = Inbox("shm").fetch(ref, 1)
    outbox.close()
    gc.collect()
    assert read_parcel("test", view)[0]["values"].sum() == 4950
