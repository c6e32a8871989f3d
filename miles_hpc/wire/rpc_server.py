"""CURVE RPC servers: RpcServer runs handlers as asyncio tasks, RpcThreadServer runs them one by one in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import logging
import queue
import secrets
import socket as os_socket
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.codec import DECODE_FAILURES
from miles_hpc.wire.rpc_client import send_frames
from miles_hpc.wire.rpc_protocol import Frames, Request, ServerCalls, failure_frames, result_frames
from miles_hpc.wire.security import DATA, Role, authenticator, load_keys, role_keys
from miles_hpc.wire.socket_options import Context, Socket, bind, prepare, prepare_server

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Any, "list[memoryview]"], Awaitable[Any]]
"""`async def f(params, frames)`, returns a value of msgpack types, or (value, list of buffers)."""
PlainHandler: TypeAlias = Callable[[Any, "list[memoryview]"], Any]
"""The same as a plain function."""

_TURN = 100


class RpcListener:
    """The bound ROUTER of a server and what it knows of its calls; `pump` never waits."""

    def __init__(
        self, listen: HostAndPort, run_dir: Path, attempt: int, roles: tuple[Role, ...], context: Context | None
    ) -> None:
        context = context or zmq.Context.instance()
        incarnation = secrets.token_bytes(16)
        self._domain = f"rpc-{incarnation.hex()}"
        self._zap = authenticator(context)
        self._zap.allow(self._domain, role_keys(run_dir, attempt, roles))
        keys = load_keys(run_dir, attempt, DATA)
        self._calls = ServerCalls(incarnation, self._send)
        self.socket: Socket = context.socket(zmq.ROUTER)
        try:
            prepare(self.socket, listen)
            prepare_server(self.socket, keys, self._domain)
            self.socket.set(zmq.ROUTER_MANDATORY, 1)
            self.socket.set(zmq.ROUTER_HANDOVER, 1)
            self.socket.set(zmq.BACKLOG, 1024)
            # Queued answers are bounded by the calls that clients have open.
            self.socket.sndhwm = self.socket.rcvhwm = 0
            self.address = bind(self.socket, listen)
        except BaseException:
            self.close()
            raise

    def pump(self) -> tuple[list[Request], bool]:
        """Calls that must be run now, and whether more messages may wait."""
        requests: list[Request] = []
        for _ in range(_TURN):
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return requests, False
            try:
                request = self._calls.on_frames(route.bytes, [frame.buffer for frame in frames])
            except (*DECODE_FAILURES, IndexError) as failure:
                log.warning("an RPC message to %s was dropped: %s", self.address.netloc, failure)
                continue
            if request is not None:
                requests.append(request)
        return requests, True

    def answer(self, request: Request, frames: Frames) -> None:
        """Send and keep the answer of a call."""
        self._calls.on_done(request, frames)

    def close(self) -> None:
        """Close the socket."""
        self._zap.forbid(self._domain)
        self.socket.close(linger=0)

    def _send(self, route: bytes, frames: Frames) -> None:
        try:
            send_frames(self.socket, [route, *frames])
        except zmq.ZMQError as failure:
            # The client is gone; it asks again after its reconnect, and the answer is kept until then.
            if failure.errno not in (zmq.EHOSTUNREACH, errno.EAGAIN):
                raise


def _failed(request: Request, failure: BaseException) -> Frames:
    text = "".join(traceback.format_exception(failure))
    return failure_frames(request, type(failure).__name__, str(failure), text)


def _unknown(request: Request, methods: Mapping[str, Any]) -> Frames:
    known = ", ".join(sorted(methods)) or "none"
    return failure_frames(request, "UnknownMethod", f"no method {request.method!r}; known: {known}", "")


class RpcServer:
    """Serves methods on one address; each call runs as its own task.

    It is bound when constructed, and answers from `serve` on.

    Args:
        listen: port 0 picks a free one; `address` tells it.
        methods: name -> handler.
        roles: whose keys are admitted.

    Raises:
        OSError: when the address cannot be bound.
        SecurityError: when the keys of the attempt cannot be read.
    """

    def __init__(
        self,
        listen: HostAndPort,
        methods: Mapping[str, Handler],
        run_dir: Path,
        attempt: int,
        *,
        roles: tuple[Role, ...] = ("worker",),
        context: Context | None = None,
    ) -> None:
        self._methods = dict(methods)
        self._listener = RpcListener(listen, run_dir, attempt, roles, context)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump_due = False
        self._closed: asyncio.Future[None] | None = None

    @property
    def address(self) -> HostAndPort:
        """Where it listens."""
        return self._listener.address

    async def serve(self) -> None:
        """Answer calls until cancelled or closed; running handlers are then cancelled."""
        if self._listener.socket.closed:
            return
        loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        descriptor = self._listener.socket.get(zmq.FD)
        assert isinstance(descriptor, int)
        loop.add_reader(descriptor, self._pump)
        self._pump_soon()
        try:
            await self._closed
        finally:
            loop.remove_reader(descriptor)
            self._closed = None
            running = list(self._tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._listener.close()

    def close(self) -> None:
        """End `serve`; without one, just release the address."""
        if self._closed is None:
            self._listener.close()
        elif not self._closed.done():
            self._closed.set_result(None)

    def _pump_soon(self) -> None:
        # A ZeroMQ descriptor is edge-triggered, and any send may take the edge: so after a send, look.
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if self._closed is None:
            return
        requests, more = self._listener.pump()
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._run(request), name=f"rpc {request.method}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if more or requests:
            self._pump_soon()

    async def _run(self, request: Request) -> None:
        handler = self._methods.get(request.method)
        try:
            if handler is None:
                frames = _unknown(request, self._methods)
            else:
                frames = result_frames(request, await handler(request.params, request.frames))
        except asyncio.CancelledError as failure:
            if self._closed is None:
                raise
            frames = _failed(request, failure)  # the handler's own doing, so its caller must hear of it
        except Exception as failure:
            log.exception("RPC %s failed", request.method)
            frames = _failed(request, failure)
        self._listener.answer(request, frames)
        self._pump_soon()


class RpcThreadServer:
    """Serves plain functions, one call after another, in the thread that runs `serve_forever`.

    A second thread owns the socket, so that clients reach the server while a handler computes.

    Args and errors as RpcServer.
    """

    def __init__(
        self,
        listen: HostAndPort,
        methods: Mapping[str, PlainHandler],
        run_dir: Path,
        attempt: int,
        *,
        roles: tuple[Role, ...] = ("worker",),
        context: Context | None = None,
    ) -> None:
        for name, method in methods.items():
            if inspect.iscoroutinefunction(method):
                raise TypeError(f"method {name!r} is a coroutine function; RpcThreadServer runs plain functions")
        self._methods = dict(methods)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Request, Frames] | None] = queue.SimpleQueue()
        self._listener = RpcListener(listen, run_dir, attempt, roles, context)
        self._wake_in, self._wake_out = os_socket.socketpair()
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._own_socket, name="rpc-socket", daemon=True)
        self._thread.start()

    def __enter__(self) -> RpcThreadServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> HostAndPort:
        """Where it listens."""
        return self._listener.address

    def serve_forever(self) -> None:
        """Run calls in this thread until `stop`."""
        while (request := self._requests.get()) is not None:
            self._reply(request, self._run(request))

    def stop(self) -> None:
        """End `serve_forever` after the running call; calls that wait are not run. From any thread, or a handler."""
        self._requests.put(None)

    def close(self) -> None:
        """Send what answers are done, then release the address."""
        self.stop()
        if self._thread.is_alive():
            self._answers.put(None)
            self._wake()
            self._thread.join()
            self._wake_in.close()
            self._wake_out.close()

    def _run(self, request: Request) -> Frames:
        handler = self._methods.get(request.method)
        try:
            if handler is None:
                return _unknown(request, self._methods)
            return result_frames(request, handler(request.params, request.frames))
        except Exception as failure:
            log.exception("RPC %s failed", request.method)
            return _failed(request, failure)

    def _reply(self, request: Request, frames: Frames) -> None:
        self._answers.put((request, frames))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            self._wake_in.send(b"\0")

    def _own_socket(self) -> None:
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._wake_out.fileno() in ready:
                    self._wake_out.recv(4096)
                requests, _ = self._listener.pump()
                for request in requests:
                    self._requests.put(request)
                while not self._answers.empty():
                    answer = self._answers.get()
                    if answer is None:
                        return
                    self._listener.answer(*answer)
        finally:
            self._listener.close()
