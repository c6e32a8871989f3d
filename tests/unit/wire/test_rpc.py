"""Clients and servers of both kinds over loopback sockets, in one process."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import pytest
import zmq

from miles_hpc.wire import rpc_link, rpc_server
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.rpc import (
    RpcClient,
    RpcRemoteError,
    RpcServer,
    RpcThreadServer,
    RpcTimeout,
    RpcUnknownOutcome,
    RpcUnreachable,
    SyncRpcClient,
)
from miles_hpc.wire.rpc_messages import decode_to_client
from miles_hpc.wire.security import SecurityError, create_secrets

pytestmark = pytest.mark.unit

LOCALHOST = HostAndPort("127.0.0.1", 0)
NOBODY = HostAndPort("127.0.0.1", 1)


async def echo(params, frames):
    return params


async def reverse(params, frames):
    return len(frames), [bytes(frame)[::-1] for frame in frames]


async def fail(params, frames):
    raise KeyError("no such thing")


async def never(params, frames):
    await asyncio.Event().wait()


METHODS = {"echo": echo, "reverse": reverse, "fail": fail, "never": never}


@asynccontextmanager
async def serving(run_dir, listen=LOCALHOST, methods=METHODS, rebind=None):
    def bind():
        return RpcServer(listen, methods, run_dir, 1)

    server = rebind(bind) if rebind else bind()
    task = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        server.close()
        await task


@contextmanager
def thread_serving(run_dir, methods, listen=LOCALHOST):
    with RpcThreadServer(listen, methods, run_dir, 1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def run(body):
    """Run a coroutine function with a limit that only a hang reaches."""
    asyncio.run(asyncio.wait_for(body(), 60))


def test_values_and_buffers_come_back(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1) as client:
            assert await client.call("echo", {"a": [1, None, "ä"], "b": b"\0"}, timeout_s=20) == {
                "a": [1, None, "ä"],
                "b": b"\0",
            }
            large = bytearray(range(256)) * 10_000
            value, frames = await client.call_frames("reverse", frames=[b"abc", large, b""], timeout_s=20)
            assert value == 3
            assert [bytes(frame) for frame in frames] == [b"cba", bytes(large[::-1]), b""]

    run(body)


def test_calls_run_at_the_same_time_and_each_gets_its_own_answer(run_dir):
    async def body():
        arrived, gate = [], asyncio.Event()

        async def gated(params, frames):
            arrived.append(params)
            if len(arrived) == 500:
                gate.set()
            await gate.wait()
            return params * 2

        async with serving(run_dir, methods={"gated": gated}) as server:
            async with RpcClient(server.address, run_dir, 1) as client:
                found = await asyncio.gather(*(client.call("gated", n, timeout_s=50) for n in range(500)))
                assert found == [2 * n for n in range(500)]

    run(body)


def test_an_exception_over_there_comes_with_type_text_and_traceback(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1) as client:
            with pytest.raises(RpcRemoteError, match="KeyError: 'no such thing'") as caught:
                await client.call("fail", timeout_s=20)
            assert caught.value.type_name == "KeyError"
            assert "in fail" in caught.value.traceback
            assert await client.call("echo", 1, timeout_s=20) == 1

    run(body)


def test_an_unknown_method_is_answered_with_the_known_ones(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1) as client:
            with pytest.raises(RpcRemoteError, match="no method 'ecko'; known: echo, fail, never, reverse"):
                await client.call("ecko", timeout_s=20)

    run(body)


def test_a_result_that_cannot_be_sent_is_the_caller_s_error(run_dir):
    async def odd(params, frames):
        return object()

    async def body():
        async with serving(run_dir, methods={"odd": odd}) as server, RpcClient(server.address, run_dir, 1) as client:
            with pytest.raises(RpcRemoteError, match="TypeError"):
                await client.call("odd", timeout_s=20)

    run(body)


def test_a_handler_that_cancels_itself_is_the_caller_s_error(run_dir):
    async def gives_up(params, frames):
        raise asyncio.CancelledError

    async def body():
        async with serving(run_dir, methods={"gives_up": gives_up}) as server:
            async with RpcClient(server.address, run_dir, 1) as client:
                with pytest.raises(RpcRemoteError, match="CancelledError"):
                    await client.call("gives_up", timeout_s=20)

    run(body)


def test_an_argument_that_cannot_be_sent_is_a_type_error_here(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1) as client:
            with pytest.raises(TypeError):
                await client.call("echo", object(), timeout_s=20)
            assert await client.call("echo", 1, timeout_s=20) == 1

    run(body)


def test_a_call_that_is_not_answered_times_out_with_its_name(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1) as client:
            await client.call("echo", timeout_s=20)
            with pytest.raises(RpcTimeout, match=r"call 'never' to 127\.0\.0\.1:\d+ was not answered within 0\.1 s"):
                await client.call("never", timeout_s=0.1)
            assert await client.call("echo", 1, timeout_s=20) == 1

    run(body)


def test_a_cancelled_call_leaves_the_client_usable(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1) as client:
            await client.call("echo", timeout_s=20)
            task = asyncio.create_task(client.call("never", timeout_s=60))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await client.call("echo", 1, timeout_s=20) == 1

    run(body)


def test_nobody_at_the_address_is_unreachable_in_time(run_dir):
    async def body():
        async with RpcClient(NOBODY, run_dir, 1) as client:
            started = time.monotonic()
            with pytest.raises(RpcUnreachable, match="nobody accepted the connection"):
                await client.call("echo", timeout_s=0.3)
            assert time.monotonic() - started < 5

    run(body)


def test_an_address_that_is_never_known_is_unreachable_in_time(run_dir):
    async def body():
        async with RpcClient(lambda: None, run_dir, 1) as client:
            with pytest.raises(RpcUnreachable, match="an address that is not known yet"):
                await client.call("echo", timeout_s=0.3)

    run(body)


def test_a_client_with_another_attempt_s_keys_is_told_so(run_dir):
    create_secrets(run_dir, 2)

    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 2) as client:
            with pytest.raises(RpcUnreachable, match="of another run or attempt"):
                await client.call("echo", timeout_s=0.5)

    run(body)


def test_a_role_that_is_not_admitted_is_told_so(run_dir):
    async def body():
        async with serving(run_dir) as server, RpcClient(server.address, run_dir, 1, role="operator") as client:
            with pytest.raises(RpcUnreachable, match="does not know this process's key"):
                await client.call("echo", timeout_s=0.5)

    run(body)


def test_an_attempt_without_keys_is_named(tmp_path):
    with pytest.raises(SecurityError, match="no worker key of attempt 1"):
        RpcClient(NOBODY, tmp_path, 1)
    with pytest.raises(SecurityError, match="of attempt 1"):
        RpcServer(LOCALHOST, {}, tmp_path, 1)


def test_a_call_waits_for_a_server_that_starts_later(run_dir):
    async def body():
        where = []
        async with RpcClient(lambda: where[0] if where else None, run_dir, 1) as client:
            call = asyncio.create_task(client.call("echo", 7, timeout_s=50))
            await asyncio.sleep(0)
            async with serving(run_dir) as server:
                where.append(server.address)
                assert await call == 7

    run(body)


def test_a_server_that_moved_is_followed(run_dir):
    async def body():
        where = [NOBODY]
        async with RpcClient(lambda: where[0], run_dir, 1) as client:
            for _ in range(3):
                async with serving(run_dir) as server:
                    where[0] = server.address
                    assert await client.call("echo", 1, timeout_s=50) == 1

    run(body)


def test_a_server_that_came_back_at_its_address_is_found_again(run_dir, rebind):
    async def body():
        async with serving(run_dir) as server:
            address = server.address
            client = RpcClient(address, run_dir, 1)
            assert await client.call("echo", 1, timeout_s=50) == 1
        async with serving(run_dir, address, rebind=rebind), client:
            assert await client.call("echo", 2, timeout_s=50, idempotent=True) == 2

    run(body)


def test_a_call_whose_server_was_replaced_ends_with_an_unknown_outcome(run_dir, rebind):
    async def body():
        started = asyncio.Event()

        async def hang(params, frames):
            started.set()
            await asyncio.Event().wait()

        async with serving(run_dir, methods={"hang": hang}) as server:
            address = server.address
            client = RpcClient(address, run_dir, 1)
            call = asyncio.create_task(client.call("hang", timeout_s=50))
            await started.wait()
        async with serving(run_dir, address, {"hang": echo}, rebind), client:
            with pytest.raises(RpcUnknownOutcome, match="call 'hang' was replaced before it answered"):
                await call
            assert await client.call("hang", 1, timeout_s=50) == 1

    run(body)


def test_a_closed_client_ends_its_open_calls(run_dir):
    async def body():
        async with serving(run_dir) as server:
            client = RpcClient(server.address, run_dir, 1)
            call = asyncio.create_task(client.call("never", timeout_s=50))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(RpcUnreachable, match="closed"):
                await call
            with pytest.raises(RpcUnreachable, match="closed"):
                await client.call("echo", timeout_s=50)

    run(body)


def test_a_closed_server_cancels_its_handlers(run_dir):
    async def body():
        started, ended = asyncio.Event(), asyncio.Event()

        async def hang(params, frames):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with serving(run_dir, methods={"hang": hang}) as server:
            async with RpcClient(server.address, run_dir, 1) as client:
                call = asyncio.create_task(client.call("hang", timeout_s=50))
                await started.wait()
                server.close()
                await ended.wait()
                call.cancel()

    run(body)


def test_a_server_sends_the_answers_it_has_before_it_closes(run_dir):
    # Whether they get through depends on who is faster, the answer or the end of the connection.
    async def body():
        sent = []

        async def last(params, frames):
            server.close()
            return "done"

        server = RpcServer(LOCALHOST, {"last": last}, run_dir, 1)
        calls = server._listener._calls
        send = calls._send
        calls._send = lambda route, frames: (sent.append(decode_to_client.decode(frames[0])), send(route, frames))
        serve = asyncio.create_task(server.serve())
        async with RpcClient(server.address, run_dir, 1) as client:
            call = asyncio.create_task(client.call("last", timeout_s=50))
            await serve
            call.cancel()
        assert [bytes(each.value) for message in sent[1:] for each in message.answers] == [b"\xa4done"]

    run(body)


def test_an_address_in_use_is_named(run_dir):
    async def body():
        async with serving(run_dir) as server:
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.address.port}"):
                RpcServer(server.address, {}, run_dir, 1)

    run(body)


# ------------------------------------------------------------------------------------------ threads
def test_a_thread_server_runs_calls_one_by_one_in_its_own_thread(run_dir):
    busy, threads, overlaps = threading.Lock(), set(), []

    def work(params, frames):
        if not busy.acquire(blocking=False):
            overlaps.append(params)
            return None
        with_ident = threading.get_ident()
        threads.add(with_ident)
        busy.release()
        return params, [bytes(frame) for frame in frames]

    async def body(server):
        async with RpcClient(server.address, run_dir, 1) as client:
            calls = (client.call_frames("work", n, frames=[b"x"], timeout_s=50) for n in range(50))
            for n, (value, frames) in enumerate(await asyncio.gather(*calls)):
                assert (value, [bytes(frame) for frame in frames]) == (n, [b"x"])

    with thread_serving(run_dir, {"work": work}) as server:
        run(lambda: body(server))
    assert (len(threads), overlaps) == (1, [])


def test_a_sync_client_gets_values_buffers_and_errors(run_dir):
    def fails(params, frames):
        raise ValueError("bad")

    methods = {"echo": lambda params, frames: (params, [bytes(frame) for frame in frames]), "fails": fails}
    with thread_serving(run_dir, methods) as server, SyncRpcClient(server.address, run_dir, 1) as client:
        value, frames = client.call_frames("echo", [1], frames=[b"a" * 100_000], timeout_s=20)
        assert (value, [bytes(frame) for frame in frames]) == ([1], [b"a" * 100_000])
        with pytest.raises(RpcRemoteError, match="ValueError: bad"):
            client.call("fails", timeout_s=20)
        with pytest.raises(RpcRemoteError, match="UnknownMethod"):
            client.call("none", timeout_s=20)


def test_a_sync_client_times_out_and_stays_usable(run_dir):
    gate = threading.Event()
    with thread_serving(run_dir, {"wait": lambda params, frames: gate.wait(params)}) as server:
        with SyncRpcClient(server.address, run_dir, 1) as client:
            with pytest.raises(RpcTimeout):
                client.call("wait", 60, timeout_s=0.3)
            gate.set()
            assert client.call("wait", 0, timeout_s=20) is True
        with SyncRpcClient(lambda: None, run_dir, 1) as lost, pytest.raises(RpcUnreachable):
            lost.call("wait", timeout_s=0.1)


def test_a_sync_client_may_be_shared_by_threads(run_dir):
    with thread_serving(run_dir, {"twice": lambda params, frames: params * 2}) as server:
        with SyncRpcClient(server.address, run_dir, 1) as client:
            found = {}

            def call(n):
                found[n] = client.call("twice", n, timeout_s=50)

            threads = [threading.Thread(target=call, args=(n,)) for n in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert found == {n: 2 * n for n in range(16)}


def test_a_sync_client_whose_last_answer_was_prompt_stays_awake_for_the_next(run_dir, monkeypatch):
    awake, begun = threading.Event(), threading.Event()

    def wait(params, frames):
        begun.set()
        return awake.wait(30)

    monkeypatch.setattr(rpc_link.os, "sched_yield", lambda: awake.set() if begun.is_set() else None)
    monkeypatch.setattr(rpc_link, "PROMPT_S", 50.0)
    methods = {"at_once": lambda params, frames: None, "wait": wait}
    with thread_serving(run_dir, methods) as server, SyncRpcClient(server.address, run_dir, 1) as client:
        client.call("at_once", timeout_s=50)
        assert client.call("wait", timeout_s=50) is True


def test_a_sync_client_sleeps_through_a_long_call(run_dir):
    methods = {"at_once": lambda params, frames: None, "long": lambda params, frames: threading.Event().wait(1.0)}
    with thread_serving(run_dir, methods) as server, SyncRpcClient(server.address, run_dir, 1) as client:
        for _ in range(20):
            client.call("at_once", timeout_s=50)
        before = time.thread_time()
        client.call("long", timeout_s=50)
        assert time.thread_time() - before < 0.1


@pytest.mark.parametrize("idle", [False, True], ids=["just started", "after an idle time"])
def test_a_thread_server_is_reachable_while_it_computes(run_dir, monkeypatch, idle):
    if idle:
        monkeypatch.setattr(rpc_server, "_STAND_BY_S", 0.0)
    started, gate = threading.Event(), threading.Event()

    def compute(params, frames):
        started.set()
        return gate.wait(60)

    with thread_serving(run_dir, {"compute": compute}) as server:
        while idle and server._standing_by:
            time.sleep(0.01)

        async def body():
            async with RpcClient(server.address, run_dir, 1) as first, RpcClient(server.address, run_dir, 1) as second:
                call = asyncio.create_task(first.call("compute", timeout_s=50))
                await asyncio.to_thread(started.wait, 30)
                # The second gets RpcTimeout, not RpcUnreachable: the socket thread has answered its hello.
                with pytest.raises(RpcTimeout):
                    await second.call("compute", timeout_s=0.5)
                gate.set()
                assert await call is True

        run(body)


def test_a_call_that_comes_while_the_other_thread_goes_to_sleep_is_stood_in_for(run_dir, monkeypatch):
    monkeypatch.setattr(rpc_server, "_STAND_BY_S", 0.0)
    falling_asleep, begun, gate = threading.Event(), threading.Event(), threading.Event()

    class Interleaved(RpcThreadServer):
        """Its other thread has just seen that no call runs when one begins to."""

        seen = 0

        @property
        def _away_since(self):
            found = self.found
            if found is None and threading.current_thread() is self._stand_in:
                self.seen += 1
                if self.seen == 2:
                    falling_asleep.set()
                    begun.wait(30)
            return found

        @_away_since.setter
        def _away_since(self, found):
            self.found = found

    def compute(params, frames):
        begun.set()
        return gate.wait(60)

    def call(address):
        with SyncRpcClient(address, run_dir, 1) as client:
            assert client.call("compute", timeout_s=50) is True

    with Interleaved(LOCALHOST, {"compute": compute}, run_dir, 1) as server:
        threads = [threading.Thread(target=server.serve_forever)]
        threads[0].start()
        assert falling_asleep.wait(30)
        for _ in range(2):
            threads.append(threading.Thread(target=call, args=(server.address,)))
            threads[-1].start()
            assert begun.wait(30)
        deadline = time.monotonic() + 20
        while not server._requests and time.monotonic() < deadline:
            time.sleep(0.01)
        taken = len(server._requests)
        gate.set()
        for thread in threads[1:]:
            thread.join()
        server.stop()
        threads[0].join()
    assert taken == 1


def test_calls_of_several_clients_around_the_time_when_another_thread_takes_the_socket_are_all_answered(run_dir):
    """A serving thread that comes back must see what the other one has taken, instead of waiting for more."""

    def work(params, frames):
        time.sleep(rpc_server._STAND_IN_S + params / 1000)
        return params

    def calls(address, shares, answers):
        with SyncRpcClient(address, run_dir, 1) as client:
            answers += [client.call("work", share, timeout_s=50) for share in shares]

    with thread_serving(run_dir, {"work": work}) as server:
        wanted = [[n * third for n in range(8)] for third in (0, 1, 2)]
        found = [[] for _ in wanted]
        threads = [
            threading.Thread(target=calls, args=(server.address, *each)) for each in zip(wanted, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == wanted


def test_a_handler_may_stop_its_own_server(run_dir):
    with RpcThreadServer(LOCALHOST, {"stop": lambda params, frames: server.stop()}, run_dir, 1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with SyncRpcClient(server.address, run_dir, 1) as client:
            assert client.call("stop", timeout_s=20) is None
        thread.join(20)
        assert not thread.is_alive()


def test_a_thread_server_ends_also_when_its_wake_is_lost(run_dir):
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 32)
    crowd = []
    with RpcThreadServer(LOCALHOST, {}, run_dir, 1, context=context) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        while server._away_since is not None:
            time.sleep(0.01)
        with pytest.raises(zmq.ZMQError):  # no socket is left that could wake it
            while True:
                crowd.append(context.socket(zmq.DEALER))
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
        for one in crowd:
            one.close()
    context.term()


def test_a_thread_server_refuses_coroutine_functions(run_dir):
    with pytest.raises(TypeError, match="'echo' is a coroutine function"):
        RpcThreadServer(LOCALHOST, {"echo": echo}, run_dir, 1)
