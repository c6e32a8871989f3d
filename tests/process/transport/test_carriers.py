"""Parcels between processes: shared memory, TCP, files; breaks, wrong keys, and memory that is used again."""

import gc
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from miles_hpc.transport import bulk
from miles_hpc.transport.bulk import PART, BulkClient, BulkRefused, BulkTimeout, ParcelGone
from miles_hpc.transport.carriers import Inbox, Outbox, ParcelRef, map_parcel, write_parcel
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
    assert outbox._held[ref.id]._packing is None
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


class Peer:
    """A consumer that says what it likes."""

    def __init__(self, address, key=None):
        self.socket = socket.create_connection((address.host, address.port), 20)
        self.nonce = self.hear()[2]
        if key is not None:
            self.say(bulk.PROOF, 0, bulk.proof(key, self.nonce))
            assert self.hear()[0] == bulk.WELCOME

    def say(self, word, number=0, body=b""):
        self.socket.sendall(bulk.HEAD.pack(word, number, len(body)) + body)

    def pull(self, parcel, first=0, credits=bulk.CREDITS):
        self.say(bulk.PULL, first, credits.to_bytes(4, "little") + parcel)

    def hear(self):
        word, number, length = bulk.HEAD.unpack(self._exactly(bulk.HEAD.size))
        return word, number, self._exactly(length)

    def _exactly(self, count):
        found = bytearray()
        while len(found) < count:
            data = self.socket.recv(count - len(found))
            assert data, "the connection was closed"
            found += data
        return bytes(found)

    def close(self):
        self.socket.close()


def test_who_does_not_prove_the_key_gets_nothing(outbox):
    ref = outbox.offer(packing(np.arange(1000)))
    for word, body in (
        (bulk.PULL, b"\1\0\0\0" + ref.id),
        (bulk.PROOF, bulk.proof(b"another", b"n" * 32)),
        (bulk.PROOF, b""),
        (bulk.CREDIT, b""),
        (0, b""),
    ):
        stranger = Peer(outbox.address)
        stranger.say(word, 0, body)
        assert stranger.hear() == (bulk.REFUSED, 0, b"")
        assert stranger.socket.recv(1) == b""
        stranger.close()
    # A proof is of its own connection's nonce.
    known, thief = Peer(outbox.address), Peer(outbox.address)
    thief.say(bulk.PROOF, 0, bulk.proof(ref.key, known.nonce))
    assert thief.hear()[0] == bulk.REFUSED
    known.close()
    thief.close()
    assert bytes(Inbox("tcp").fetch(ref, 10)) == bytes(Inbox("shm").fetch(ref, 10))


def test_junk_ends_its_own_connection_only(outbox):
    ref = outbox.offer(packing(np.arange(1000)))
    for junk in (
        bulk.HEAD.pack(bulk.PULL, 0, 1 << 30),
        bulk.HEAD.pack(bulk.PULL, 0, 3) + b"abc",
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    ):
        peer = Peer(outbox.address, ref.key)
        peer.socket.sendall(junk)
        assert peer.socket.recv(1) == b""
        peer.close()
    assert bytes(Inbox("tcp").fetch(ref, 10)) == bytes(Inbox("shm").fetch(ref, 10))


def test_a_parcel_that_cannot_be_laid_out_ends_its_own_connection_only(outbox, monkeypatch):
    class Broken(Packing):
        def writing(self, into, step=PART):
            raise MemoryError("no room")
            yield

    good, bad = outbox.offer(packing([1])), outbox.offer(Broken("test", {"values": np.zeros(9)}), remote=True)
    peer = Peer(outbox.address, bad.key)
    peer.pull(bad.id)
    assert peer.socket.recv(1) == b""
    peer.close()
    assert Inbox("tcp").fetch(good, 10)


def test_of_too_many_connections_that_prove_nothing_the_oldest_is_closed(outbox, monkeypatch):
    monkeypatch.setattr(bulk, "_UNPROVED", 5)
    monkeypatch.setattr(bulk, "_PROVE_S", 1000.0)
    ref = outbox.offer(packing([1]))
    known = Peer(outbox.address, ref.key)
    crowd = [Peer(outbox.address) for _ in range(8)]
    for closed in crowd[:3]:
        assert closed.socket.recv(1) == b""
    for kept in crowd[3:]:
        kept.say(bulk.PROOF, 0, bulk.proof(ref.key, kept.nonce))
        assert kept.hear()[0] == bulk.WELCOME
    known.pull(ref.id)  # it has proved the key, so it is none of them
    assert known.hear()[0] == bulk.PART_OF
    for peer in (known, *crowd):
        peer.close()


def test_a_consumer_that_takes_nothing_for_long_loses_its_connection_and_not_its_parcel(outbox, monkeypatch):
    monkeypatch.setattr(bulk, "_USER_TIMEOUT_S", 1.0)
    ref = outbox.offer(packing(np.zeros(10 * PART)))
    idle = Peer(outbox.address, ref.key)
    idle.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # whatever the machine's limits are, it fills
    idle.pull(ref.id)
    deadline = time.monotonic() + 60
    while outbox._server._peers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not outbox._server._peers
    idle.close()
    inbox = Inbox("tcp")
    assert len(inbox.fetch(ref, 60)) == ref.nbytes
    inbox.close()


@pytest.mark.parametrize("step", ["_prepare", "os.urandom"])
def test_a_connection_that_cannot_be_taken_in_ends_alone(outbox, monkeypatch, caplog, step):
    def fail(*_):
        raise OSError(22, "Invalid argument")

    ref = outbox.offer(packing([1]))
    with monkeypatch.context() as broken:
        broken.setattr(f"miles_hpc.transport.bulk.{step}", fail)
        peer = socket.create_connection((outbox.address.host, outbox.address.port), 20)
        assert peer.recv(1) == b""
        peer.close()
    assert "cannot serve a connection: OSError" in caplog.text
    assert Inbox("tcp").fetch(ref, 10)


def test_a_layout_that_failed_in_the_middle_is_begun_anew_and_never_taken_for_whole(outbox):
    class FailsOnce(Packing):
        failed = False

        def writing(self, into, step=PART):
            for count, written in enumerate(super().writing(into, step)):
                if count == 3 and not self.failed:
                    self.failed = True
                    raise MemoryError("no room")
                yield written

    old = outbox.offer(packing(np.full(PART, 7)))
    outbox.release(old)  # its memory is the next one's
    values = np.arange(PART, dtype=np.int32)
    ref = outbox.offer(FailsOnce("test", {"values": values}, {"number": 1}), remote=True)
    inbox = Inbox()
    memory = inbox.fetch(ref, 60)
    np.testing.assert_array_equal(read_parcel("test", memory)[0]["values"], values)
    assert inbox._client.connections == 2
    inbox.close()
    # Also when it is asked for by its last part alone.
    again = outbox.offer(FailsOnce("test", {"values": values}, {"number": 1}), remote=True)
    with pytest.raises(MemoryError):
        outbox.memory(again)
    np.testing.assert_array_equal(read_parcel("test", outbox.memory(again))[0]["values"], values)


def test_a_consumer_that_does_not_read_holds_nobody_up_and_gets_no_more_than_its_credits(outbox):
    parts = [np.full(PART // 4, number, np.int32) for number in range(40)]
    ref = outbox.offer(Packing("test", {"values": parts}), remote=True)
    idle = Peer(outbox.address, ref.key)
    idle.pull(ref.id, credits=2)
    assert [idle.hear()[:2] for _ in range(2)] == [(bulk.PART_OF, number) for number in range(2)]
    assert outbox._held[ref.id]._written <= 4 * PART
    idle.say(bulk.CREDIT, 1000)  # more than CREDITS are not given
    inbox = Inbox()
    np.testing.assert_array_equal(read_parcel("test", inbox.fetch(ref, 60))[0]["values"], np.concatenate(parts))
    inbox.close()
    found = [idle.hear()[:2] for _ in range(bulk.CREDITS)]
    assert found == [(bulk.PART_OF, 2 + number) for number in range(bulk.CREDITS)]
    idle.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        idle.socket.recv(1)
    # It dies without a word; one that comes back goes on where it wants to, and nothing is left of the first.
    idle.close()
    again = Peer(outbox.address, ref.key)
    again.pull(ref.id, first=ref.nbytes // PART)
    word, number, body = again.hear()
    assert (word, number, len(body)) == (bulk.PART_OF, ref.nbytes // PART, ref.nbytes % PART)
    assert again.hear()[0] == bulk.END
    again.close()


@pytest.mark.parametrize("last", [False, True])
def test_a_parcel_that_is_released_while_it_is_pulled_is_gone_and_never_another_s_bytes(outbox, last):
    ref = outbox.offer(packing(np.zeros(3 * PART // 4)))
    peer = Peer(outbox.address, ref.key)
    sent = -(-ref.nbytes // PART) if last else 2
    peer.pull(ref.id, credits=sent - last)
    for number in range(sent - last):
        assert peer.hear()[:2] == (bulk.PART_OF, number)
    outbox.release(ref)
    other = outbox.offer(packing(np.ones(3 * PART // 4)))
    assert other.segment.inode == ref.segment.inode  # its memory is filled anew
    peer.say(bulk.CREDIT, 5)
    assert peer.hear()[0] == bulk.GONE
    # The connection serves on.
    peer.pull(other.id)
    assert peer.hear()[0] == bulk.PART_OF
    peer.close()


def test_a_producer_without_descriptors_accepts_again_when_there_are_some():
    code = (
        "import resource, sys, msgspec, numpy as np\n"
        "from miles_hpc.transport.carriers import Outbox\n"
        "from miles_hpc.transport.parcel import Packing\n"
        "from miles_hpc.wire.address import HostAndPort\n"
        "outbox = Outbox(HostAndPort('127.0.0.1', 0))\n"
        "ref = outbox.offer(Packing('test', {'values': np.arange(9)}))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "print(msgspec.json.encode(ref).decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        ref = msgspec.json.decode(process.stdout.readline(), type=ParcelRef)
        crowd = [socket.create_connection((ref.address.host, ref.address.port), 20) for _ in range(60)]
        for one in crowd:
            one.close()
        inbox = Inbox("tcp")
        assert read_parcel("test", inbox.fetch(ref, 60))[0]["values"].tolist() == list(range(9))
        inbox.close()
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


class Cut:
    """A TCP relay that cuts each connection after so many bytes of answers."""

    def __init__(self, target, after):
        self._target, self._after = target, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = HostAndPort("127.0.0.1", self._listener.getsockname()[1])
        self.cuts = 0
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
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
