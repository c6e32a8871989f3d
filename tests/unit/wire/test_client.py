"""HubClient against a scripted hub: the address book, receipts, a hub that restarts, and the reasons to leave."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from miles_hpc.config.timing import Timing
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.client import HubClient, WaitTimeout
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import (
    CellAddrs,
    ClientHeartbeat,
    ClientHello,
    FinishRun,
    PoolAddrs,
    Progress,
    Refused,
    ReplaceCell,
    Superseded,
)
from miles_hpc.wire.rendezvous import RendezvousTimeout
from miles_hpc.wire.security import SecurityError, create_secrets, load_keys, secrets_dir
from miles_hpc.wire.sockets import HubError, HubRefused, WrongKey

pytestmark = pytest.mark.unit

FAST = Timing(heartbeat=0.05, suspect=0.2, dead=0.4, failover_max=0.6, hub_stall=0.8, fence=6.0, hub_grace=60)

# Timing itself keeps the fence above 5 s; the client reads only these two.
SHORT_FENCE = SimpleNamespace(heartbeat=0.05, fence=0.5)


def a_cell(pool, ready=True):
    address = {"http": HostAndPort("127.0.0.2", 20001)}
    return CellAddrs(
        cell=f"{pool}-00000", generation=Generation(1, 1), node="node-00000", ready=ready, workers=[address]
    )


def a_book(revision, *pools, healed=0):
    return PoolAddrs(revision=revision, pools={pool: [a_cell(pool)] for pool in pools}, healed=healed)


def has(pool):
    return lambda pools: pools.get(pool)


class Fatal:
    def __init__(self):
        self.reasons, self.called = [], threading.Event()

    def __call__(self, reason):
        self.reasons.append(reason)
        self.called.set()


@pytest.fixture
def connect(worker_env):
    """connect(**options) -> a started HubClient whose `fatal` records reasons."""
    clients = []

    def start(timing=FAST, timeout_s=20.0):
        fatal = Fatal()
        client = HubClient(worker_env, timing=timing, on_fatal=fatal)
        client.fatal = fatal
        clients.append(client)
        client.start(timeout_s)
        return client

    yield start
    for client in clients:
        client.close()


# ------------------------------------------------------------------------------------------ start
def test_a_client_says_who_it_is_and_learns_whom_it_talks_to(start_hub, connect, worker_env):
    hub = start_hub()
    client = connect()
    (hello,) = hub.wait_for(ClientHello)
    assert (hello.role, hello.message.worker, hello.message.generation) == (
        "worker",
        worker_env.worker,
        worker_env.generation,
    )
    assert (client.epoch, client.run_id) == (1, "r1")


def test_heartbeats_are_sent_and_counted(start_hub, connect):
    hub = start_hub()
    connect()
    beats = [item.message.seq for item in hub.wait_for(ClientHeartbeat, 3)]
    assert beats[:3] == [1, 2, 3]


def test_without_a_published_hub_start_ends_in_time(connect):
    with pytest.raises(RendezvousTimeout, match="no hub of epoch 1"):
        connect(timeout_s=0.2)


def test_without_keys_a_client_cannot_be_made(worker_env):
    (secrets_dir(worker_env.run_dir, 1) / "worker.json").unlink()
    with pytest.raises(SecurityError, match="no worker key of attempt 1"):
        HubClient(worker_env)


@pytest.mark.parametrize("code", ["superseded", "unknown"])
def test_a_refused_hello_is_raised_by_name(start_hub, connect, code):
    start_hub(react=lambda message: [Refused(code=code, text="go away")])
    with pytest.raises(HubRefused, match=rf"\({code}\): go away"):
        connect()


def test_a_superseded_hello_is_raised_by_name(start_hub, connect):
    start_hub(react=lambda message: [Superseded(reason="g1-2 runs")])
    with pytest.raises(HubRefused, match="superseded: g1-2 runs"):
        connect()


def test_a_wrong_key_is_raised_by_name_within_3_s(start_hub, connect, run_dir):
    start_hub()
    create_secrets(run_dir, 2)
    target = secrets_dir(run_dir, 1) / "worker.json"
    target.write_bytes((secrets_dir(run_dir, 2) / "worker.json").read_bytes())
    assert load_keys(run_dir, 1, "worker") == load_keys(run_dir, 2, "worker")
    started = time.monotonic()
    with pytest.raises(WrongKey):
        connect()
    assert time.monotonic() - started < 3


# ------------------------------------------------------------------------------------------ the address book
def test_waiting_returns_what_the_predicate_finds(start_hub, connect):
    start_hub(book=a_book(3, "router", "engine", healed=2))
    client = connect()
    assert client.wait_for(has("engine"), "an engine", 20) == [a_cell("engine")]
    assert (client.revision, client.healed, sorted(client.pools)) == (3, 2, ["engine", "router"])


def test_waiting_goes_on_over_changes_until_the_predicate_is_satisfied(start_hub, connect):
    hub = start_hub(book=a_book(1, "a"))
    client = connect()
    found = []
    thread = threading.Thread(target=lambda: found.append(client.wait_for(has("c"), "c", 20)))
    thread.start()
    hub.push(a_book(2, "a", "b"))
    hub.push(a_book(3, "a", "b", "c"))
    thread.join(20)
    assert found == [[a_cell("c")]]


def test_false_means_not_yet_and_zero_is_an_answer(start_hub, connect):
    start_hub(book=a_book(1, "a"))
    client = connect()
    client.wait_for(has("a"), "a", 20)
    with pytest.raises(WaitTimeout):
        client.wait_for(lambda pools: False, "never", 0.05)
    assert client.wait_for(lambda pools: 0, "a number", 0.05) == 0


def test_a_wait_that_is_over_names_what_and_shows_what_is_there(start_hub, connect):
    start_hub(book=a_book(1, "engine"))
    client = connect()
    client.wait_for(has("engine"), "an engine", 20)
    with pytest.raises(WaitTimeout, match=r"the router did not come within 0\.1 s; the address book has engine x 1"):
        client.wait_for(has("router"), "the router", 0.1)


def test_an_older_revision_of_the_same_hub_changes_nothing(start_hub, connect):
    hub = start_hub(book=a_book(5, "new"))
    client = connect()
    client.wait_for(has("new"), "new", 20)
    hub.push(a_book(4, "old"))
    hub.push(a_book(6, "newest"))
    client.wait_for(has("newest"), "newest", 20)
    assert client.revision == 6


def test_callbacks_are_told_and_a_failing_one_harms_nobody(start_hub, connect):
    hub = start_hub(book=a_book(1, "a"))
    client = connect()
    client.wait_for(has("a"), "a", 20)
    seen, told = [], threading.Event()

    def broken(pools):
        raise RuntimeError("a callback's own fault")

    def note(pools):
        seen.append(sorted(pools))
        told.set()

    client.on_change(broken)
    remove = client.on_change(note)
    hub.push(a_book(2, "b"))
    assert told.wait(20)
    remove()
    remove()
    hub.push(a_book(3, "c"))
    client.wait_for(has("c"), "c", 20)
    assert seen == [["b"]]


def test_coroutines_wait_and_follow_changes(start_hub, connect):
    hub = start_hub(book=a_book(1, "a"))
    client = connect()

    async def body():
        assert await client.async_wait_for(has("a"), "a", 20) == [a_cell("a")]
        waiting = asyncio.create_task(client.async_wait_for(has("b"), "b", 20))
        await asyncio.sleep(0)
        hub.push(a_book(2, "b"))
        assert await waiting == [a_cell("b")]
        with pytest.raises(WaitTimeout, match="the moon"):
            await client.async_wait_for(has("moon"), "the moon", 0.05)
        seen = []
        async for pools in client.async_changes():
            seen.append(sorted(pools))
            if len(seen) == 1:
                hub.push(a_book(3, "c"))
            else:
                break
        assert seen == [["b"], ["c"]]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_closed_client_ends_what_waits(start_hub, connect):
    start_hub()
    client = connect()
    errors = []

    def wait():
        try:
            client.wait_for(has("x"), "x", 60)
        except HubError as failure:
            errors.append(str(failure))

    thread = threading.Thread(target=wait)
    thread.start()

    async def body():
        async def follow():
            async for _ in client.async_changes():
                pass

        following = asyncio.create_task(follow())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(client.close)
        await following
        with pytest.raises(HubError, match="while waiting for y: the client was closed"):
            await client.async_wait_for(has("y"), "y", 60)

    asyncio.run(asyncio.wait_for(body(), 60))
    thread.join(20)
    assert errors == ["while waiting for x: the client was closed"]
    assert client.fatal.reasons == []


# ------------------------------------------------------------------------------------------ messages
def test_finish_returns_after_the_hub_has_it(start_hub, connect):
    hub = start_hub()
    connect().finish("finished", "all steps done", {"steps": 3}, timeout_s=20)
    (finish,) = hub.wait_for(FinishRun)
    assert (finish.message.outcome, finish.message.reason, finish.message.summary) == (
        "finished",
        "all steps done",
        {"steps": 3},
    )


def test_progress_and_a_cell_to_replace_reach_the_hub(start_hub, connect):
    hub = start_hub()
    client = connect()
    client.progress(Progress(step=4, weight_version=5))
    client.replace_cell("engine-00001", Generation(1, 2), "it does not load weights")
    assert hub.wait_for(Progress)[0].message == Progress(step=4, weight_version=5)
    found = hub.wait_for(ReplaceCell)[0].message
    assert (found.cell, found.generation, found.reason) == (
        "engine-00001",
        Generation(1, 2),
        "it does not load weights",
    )


def test_finish_without_a_hub_ends_in_time_by_name(start_hub, connect):
    hub = start_hub()
    client = connect()
    hub.close()
    with pytest.raises(WaitTimeout, match="the hub to take the end of the run"):
        client.finish("finished", timeout_s=0.2)


# ------------------------------------------------------------------------------------------ a hub that restarts
def test_a_hub_of_a_higher_epoch_is_followed_and_told_what_it_missed(start_hub, connect):
    first = start_hub(1, book=a_book(9, "old"))
    client = connect()
    client.wait_for(has("old"), "old", 20)
    client.progress(Progress(step=1, weight_version=1))
    first.wait_for(Progress)
    first.close()
    client.replace_cell("engine-00001", Generation(1, 2), "lost with the hub")
    finished = threading.Thread(target=client.finish, args=("finished",))
    finished.start()
    assert client.pools == a_book(9, "old").pools, "the last book is kept while there is no hub"
    second = start_hub(2, book=a_book(1, "new"))
    client.wait_for(has("new"), "new", 20)
    finished.join(20)
    assert not finished.is_alive()
    assert (client.epoch, client.revision) == (2, 1)
    second.wait_for(ReplaceCell)
    assert second.wait_for(Progress)[0].message == Progress(step=1, weight_version=1)
    kinds = [type(item.message) for item in second.received]
    assert kinds.index(ClientHello) == 0
    assert kinds.count(ReplaceCell) == kinds.count(FinishRun) == kinds.count(Progress) == 1


def test_a_newer_hub_is_found_although_the_old_one_keeps_the_connection(start_hub, connect, monkeypatch):
    monkeypatch.setattr("miles_hpc.wire.client._QUIET_HUB_S", 0.3)
    first = start_hub(1)
    client = connect()
    first.pause()
    start_hub(2, book=a_book(1, "new"))
    client.wait_for(has("new"), "new", 20)
    assert client.epoch == 2


def test_a_client_without_a_hub_does_not_spin(start_hub, connect):
    hub = start_hub()
    client = connect()
    hub.wait_for(ClientHeartbeat)
    hub.close()
    used = time.process_time()
    with pytest.raises(WaitTimeout):
        client.finish("finished", timeout_s=0.6)
    assert time.process_time() - used < 0.3


def test_a_lower_epoch_is_never_followed(start_hub, connect, run_dir):
    start_hub(2, book=a_book(1, "two"))
    client = connect()
    client.wait_for(has("two"), "two", 20)
    assert client._find_newer() is None


# ------------------------------------------------------------------------------------------ reasons to leave
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Superseded(reason="g1-2 runs"), "superseded: g1-2 runs"),
        (Refused(code="superseded", text="g1-3 runs"), "superseded: g1-3 runs"),
    ],
)
def test_a_superseded_client_says_so_once_and_ends(start_hub, connect, message, reason):
    hub = start_hub()
    client = connect()
    hub.push(message)
    assert client.fatal.called.wait(20)
    with pytest.raises(HubError, match=reason):
        client.wait_for(has("x"), "x", 20)
    client.close()
    assert client.fatal.reasons == [reason]


def test_another_refusal_is_only_logged(start_hub, connect):
    hub = start_hub()
    client = connect()
    hub.push(Refused(code="malformed", text="what?"))
    hub.push(a_book(1, "a"))
    client.wait_for(has("a"), "a", 20)
    assert client.fatal.reasons == []


def test_a_newer_hub_that_says_superseded_ends_the_client(start_hub, connect):
    first = start_hub(1)
    client = connect()
    first.close()
    start_hub(2, react=lambda message: [Refused(code="superseded", text="replaced while you were away")])
    assert client.fatal.called.wait(20)
    assert "replaced while you were away" in client.fatal.reasons[0]


def test_a_newer_hub_that_refuses_otherwise_is_tried_again_until_the_fence(start_hub, connect):
    hub = start_hub(1)
    client = connect(timing=SHORT_FENCE)
    hub.close()
    start_hub(2, react=lambda message: [Refused(code="unknown", text="not yet")])
    assert client.fatal.called.wait(30)
    assert client.fatal.reasons[0].startswith("no hub was heard for")


def test_a_silent_hub_is_fatal_at_the_fence_though_it_is_connected(start_hub, connect):
    hub = start_hub()
    client = connect(timing=SHORT_FENCE)
    hub.pause()
    assert client.fatal.called.wait(30)
    assert "timing.fence = 0.5 s" in client.fatal.reasons[0]
