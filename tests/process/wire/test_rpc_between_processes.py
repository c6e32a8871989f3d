"""RPC between processes: killed, stopped and restarted servers, several clients at once."""

from __future__ import annotations

import asyncio
import signal

import pytest

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.rpc import RpcClient, RpcTimeout, RpcUnknownOutcome, SyncRpcClient

pytestmark = pytest.mark.process

# Counts its calls in a file, so that a test sees how often one ran whatever became of the process.
SERVER = """
    import asyncio, os, sys
    from pathlib import Path
    from miles_hpc.wire.address import HostAndPort
    from miles_hpc.wire.rpc import RpcServer

    run_dir, port = Path(sys.argv[1]), int(sys.argv[2])

    def note(what):
        with (run_dir / "ran").open("a") as file:
            file.write(f"{what}\\n")

    async def echo(params, frames):
        note(params)
        return params, list(frames)

    async def hang(params, frames):
        note(params)
        await asyncio.Event().wait()

    async def pid(params, frames):
        return os.getpid()

    async def main():
        server = RpcServer(HostAndPort("127.0.0.1", port), {"echo": echo, "hang": hang, "pid": pid}, run_dir, 1)
        print(server.address.port)
        await server.serve()

    asyncio.run(main())
"""

CLIENTS = """
    import asyncio, sys
    from pathlib import Path
    from miles_hpc.wire.address import HostAndPort
    from miles_hpc.wire.rpc import RpcClient

    async def main():
        async with RpcClient(HostAndPort("127.0.0.1", int(sys.argv[2])), Path(sys.argv[1]), 1) as client:
            first = int(sys.argv[3])
            calls = [client.call("echo", n, timeout_s=100) for n in range(first, first + 300)]
            assert await asyncio.gather(*calls) == list(range(first, first + 300))
            print("done")

    asyncio.run(main())
"""

THREAD_SERVER = """
    import sys
    from pathlib import Path
    from miles_hpc.wire.address import HostAndPort
    from miles_hpc.wire.rpc import RpcThreadServer

    with RpcThreadServer(HostAndPort("127.0.0.1", 0), {"add": lambda p, f: p + 1}, Path(sys.argv[1]), 1) as server:
        print(server.address.port)
        server.serve_forever()
"""


STOPPING_SERVER = """
    import signal, sys
    from pathlib import Path
    from miles_hpc.wire.address import HostAndPort
    from miles_hpc.wire.rpc import RpcThreadServer

    with RpcThreadServer(HostAndPort("127.0.0.1", 0), {"add": lambda p, f: p + 1}, Path(sys.argv[1]), 1) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        print(server.address.port)
        server.serve_forever()
    print("left")
"""


class Where:
    """An address that a test moves, as the address book moves a restarted cell."""

    def __init__(self, port):
        self.port = port

    def __call__(self):
        return None if self.port is None else HostAndPort("127.0.0.1", self.port)


def ran(run_dir):
    path = run_dir / "ran"
    return path.read_text().split() if path.exists() else []


async def until_ran(run_dir, what):
    while what not in ran(run_dir):  # noqa: ASYNC110 - another process writes the file
        await asyncio.sleep(0.02)


def run(body):
    asyncio.run(asyncio.wait_for(body, 120))


@pytest.mark.parametrize("same_port", [True, False], ids=["same address", "another address"])
def test_a_server_killed_and_restarted_is_found_again(start, run_dir, same_port):
    first = start(SERVER, run_dir, 0)
    where = Where(int(first.line()))

    async def body():
        async with RpcClient(where, run_dir, 1) as client:
            old_pid = await client.call("pid", timeout_s=60)
            hanging = asyncio.create_task(client.call("hang", "once", timeout_s=100))
            await until_ran(run_dir, "once")
            port, where.port = where.port, where.port if same_port else None
            first.kill()
            # Begun while there is no server; it may go to whichever comes.
            waiting = asyncio.create_task(client.call("echo", "later", timeout_s=100, idempotent=True))
            second = start(SERVER, run_dir, port if same_port else 0)
            where.port = int(second.line())
            with pytest.raises(RpcUnknownOutcome, match="'hang' was replaced before it answered"):
                await hanging
            assert await waiting == "later"
            assert await client.call("pid", timeout_s=60) not in (old_pid, None)
            assert ran(run_dir) == ["once", "later"]

    run(body())


def test_an_idempotent_call_outlives_its_server(start, run_dir):
    first = start(SERVER, run_dir, 0)
    where = Where(int(first.line()))

    async def body():
        async with RpcClient(where, run_dir, 1) as client:
            call = asyncio.create_task(client.call("hang", "again", timeout_s=100, idempotent=True))
            await until_ran(run_dir, "again")
            first.kill()
            second = start(SERVER.replace("await asyncio.Event().wait()", "return 'answered'"), run_dir, 0)
            where.port = int(second.line())
            assert await call == "answered"
            assert ran(run_dir) == ["again", "again"]

    run(body())


def test_a_stopped_server_times_out_and_runs_the_call_once_when_it_goes_on(start, run_dir):
    server = start(SERVER, run_dir, 0)
    address = HostAndPort("127.0.0.1", int(server.line()))

    async def body():
        async with RpcClient(address, run_dir, 1) as client:
            await client.call("pid", timeout_s=60)
            server.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(RpcTimeout):
                    await client.call("echo", "frozen", timeout_s=0.5)
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert await client.call("echo", "thawed", timeout_s=60) == "thawed"
            assert sorted(ran(run_dir)) == ["frozen", "thawed"]

    run(body())


def test_several_client_processes_are_served_at_once(start, run_dir):
    server = start(SERVER, run_dir, 0)
    port = server.line()
    clients = [start(CLIENTS, run_dir, port, 1000 * index) for index in range(3)]
    assert [client.line() for client in clients] == ["done"] * 3
    assert len(ran(run_dir)) == len(set(ran(run_dir))) == 900


def test_large_buffers_cross_unharmed(start, run_dir):
    server = start(SERVER, run_dir, 0)
    payload = bytearray(bytes(range(256)) * (64 * 1024))  # 16 MiB
    with SyncRpcClient(HostAndPort("127.0.0.1", int(server.line())), run_dir, 1) as client:
        _, frames = client.call_frames("echo", "big", frames=[payload, b"small", payload], timeout_s=100)
        assert [frame == expected for frame, expected in zip(frames, [payload, b"small", payload], strict=True)] == [
            True
        ] * 3


def test_a_thread_server_ends_at_once_on_sigterm(start, run_dir):
    server = start(THREAD_SERVER, run_dir)
    with SyncRpcClient(HostAndPort("127.0.0.1", int(server.line())), run_dir, 1) as client:
        assert client.call("add", 1, timeout_s=60) == 2
    server.process.terminate()
    assert server.process.wait(20) == -signal.SIGTERM


def test_a_thread_server_that_waits_is_stopped_from_the_handler_of_a_signal(start, run_dir):
    server = start(STOPPING_SERVER, run_dir)
    with SyncRpcClient(HostAndPort("127.0.0.1", int(server.line())), run_dir, 1) as client:
        assert client.call("add", 1, timeout_s=60) == 2
    server.process.terminate()
    assert server.line() == "left"
    assert server.process.wait(20) == 0
