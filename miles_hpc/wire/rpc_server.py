"""CURVE RPC servers: RpcServer runs handlers as asyncio tasks, RpcThreadServer runs them one by one in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import logging
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.codec import DECODE_FAILURES
from miles_hpc.wire.rpc_link import NOBLOCK, NOBLOCK_MORE, descriptor_of, has_message, receive_frames, send_frames
from miles_hpc.wire.rpc_messages import Frames
from miles_hpc.wire.rpc_server_calls import Answer, Request, ServerCalls, failure, result
from miles_hpc.wire.security import DATA, Role, authenticator, load_keys, role_keys
from miles_hpc.wire.socket_options import Context, Socket, bind, milliseconds, prepare, prepare_server

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Any, "list[memoryview]"], Awaitable[Any]]
"""`async def f(params, frames)`, returns a value of msgpack types, or (value, list of buffers)."""
PlainHandler: TypeAlias = Callable[[Any, "list[memoryview]"], Any]
"""The same as a plain function."""

_WAKE = b""
_LOOK_UP_S = 1.0
"""How often a thread that waits for a message looks up from it."""
_TURN = 100
"""Messages that are taken in one turn."""
_STAND_IN_S = 0.05
"""How long a handler of a thread server may run before another thread looks after the socket."""
_TOGETHER_S = 0.001
"""How long an answer of a thread server may wait for those of calls that have come already."""
_STAND_BY_S = 1.0
"""How long without a call that thread waits before it sleeps for good."""


class RpcListener:
    """The bound ROUTER of a server and what it knows of its calls; `pump` never waits."""

    def __init__(
        self, listen: HostAndPort, run_dir: Path, attempt: int, roles: tuple[Role, ...], context: Context | None
    ) -> None:
        self._context = context = context or zmq.Context.instance()
        incarnation = secrets.token_bytes(16)
        self._domain = f"rpc-{incarnation.hex()}"
        self._closed = False
        self._wake_address = f"inproc://{self._domain}"
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
            self.socket.rcvtimeo = milliseconds(_LOOK_UP_S)
            self.address = bind(self.socket, listen)
            self.socket.bind(self._wake_address)
        except BaseException:
            self.close()
            raise

    def pump(self) -> tuple[list[Request], bool]:
        """Calls that must be run now, of those messages that have come, and whether more messages may wait."""
        requests: list[Request] = []
        for _ in range(_TURN):
            if not has_message(self.socket):
                return requests, False
            requests += self.wait()
        return requests, True

    def wait(self, until: Callable[[], bool] = lambda: False) -> list[Request]:
        """Wait for the next message, or `wake`; returns the calls that must be run now.

        Args:
            until: looked at every `_LOOK_UP_S`: a `wake` that got lost costs no more than that.
        """
        while True:
            try:
                route = self.socket.recv()
                break
            except zmq.Again:
                # A signal that came just before the wait has interrupted nothing: its handler runs now.
                if until():
                    return []
        frames = receive_frames(self.socket)
        if frames[0] == _WAKE:
            return []
        try:
            return self._calls.on_frames(route, frames)
        except (*DECODE_FAILURES, IndexError) as trouble:
            log.warning("an RPC message to %s was dropped: %s", self.address.netloc, trouble)
            return []

    def wake(self) -> None:
        """End a `wait` of another thread, or of the code that a signal has interrupted."""
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as waker:
            waker.connect(self._wake_address)
            waker.send(_WAKE, NOBLOCK)

    def answer(self, request: Request, answer: Answer) -> None:
        """Keep the answer of a call, to be sent by the next `flush`."""
        self._calls.on_done(request, answer)

    def flush(self) -> None:
        """Send the answers that are ready, all of one client at once."""
        if not self._closed:
            self._calls.flush()

    def close(self) -> None:
        """Close the socket."""
        self._closed = True
        self._zap.forbid(self._domain)
        self.socket.close(linger=0)

    def _send(self, route: bytes, frames: Frames) -> None:
        try:
            self.socket.send(route, NOBLOCK_MORE)
            send_frames(self.socket, frames)
        except zmq.ZMQError as trouble:
            # The client is gone; it asks again after its reconnect, and the answer is kept until then.
            if trouble.errno not in (zmq.EHOSTUNREACH, errno.EAGAIN):
                raise


def _failed(request: Request, trouble: BaseException) -> Answer:
    text = "".join(traceback.format_exception(trouble))
    return failure(request, type(trouble).__name__, str(trouble), text)


def _unknown(request: Request, methods: Mapping[str, Any]) -> Answer:
    known = ", ".join(sorted(methods)) or "none"
    return failure(request, "UnknownMethod", f"no method {request.method!r}; known: {known}", "")


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
        self._turn_due = False
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
        descriptor = descriptor_of(self._listener.socket)
        loop.add_reader(descriptor, self._turn)
        self._turn_soon()
        try:
            await self._closed
        finally:
            loop.remove_reader(descriptor)
            self._closed = None
            running = list(self._tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._listener.flush()  # what has just been answered; it may still arrive before the connection ends
            self._listener.close()

    def close(self) -> None:
        """End `serve`; without one, just release the address."""
        if self._closed is None:
            self._listener.close()
        elif not self._closed.done():
            self._closed.set_result(None)

    def _turn_soon(self) -> None:
        # A ZeroMQ descriptor is edge-triggered, and any send may take the edge: so after a send, look.
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Send what has been answered in this turn of the loop, and begin what has come."""
        self._turn_due = False
        if self._closed is None:
            return
        self._listener.flush()
        requests, more = self._listener.pump()
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._run(request), name=request.method)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if requests or more:
            self._turn_soon()  # after the first steps of these tasks, hence with the answers of those that do not wait

    async def _run(self, request: Request) -> None:
        handler = self._methods.get(request.method)
        try:
            if handler is None:
                answer = _unknown(request, self._methods)
            else:
                answer = result(request, await handler(request.params, request.frames))
        except asyncio.CancelledError as trouble:
            if self._closed is None:
                raise
            answer = _failed(request, trouble)  # the handler's own doing, so its caller must hear of it
        except Exception as trouble:
            log.exception("RPC %s failed", request.method)
            answer = _failed(request, trouble)
        self._listener.answer(request, answer)
        self._turn_soon()


class RpcThreadServer:
    """Serves plain functions, one call after another, in the thread that runs `serve_forever`.

    That thread has the socket, too. While it runs a long handler, and before it serves, another one stands in, so that
    clients reach the server at any time.

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
        self._requests: deque[Request] = deque()
        self._listener = RpcListener(listen, run_dir, attempt, roles, context)
        self._lock = threading.Lock()
        """Of the socket; the serving thread has it also while it waits there."""
        self._away_since: float | None = time.monotonic()
        """When the serving thread turned from the socket to something else; None while it waits at the socket."""
        self._called_at = 0.0
        self._standing_by = True
        self._stopping = self._closed = False
        self._needed = threading.Event()
        self._stand_in = threading.Thread(target=self._look_after_socket, name="rpc-socket", daemon=True)
        self._stand_in.start()

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
        flushed_at = 0.0
        while not self._stopping:
            if not self._requests:
                with self._lock:
                    self._wait()
                continue
            request = self._requests.popleft()
            answer = self._run(request)
            with self._lock:
                self._listener.answer(request, answer)
                # Of many short calls the answers leave together; should the next be long, the other thread sends this.
                now = time.monotonic()
                if not self._requests or now - flushed_at >= _TOGETHER_S:
                    self._listener.flush()
                    flushed_at = now
        with self._lock:
            self._listener.flush()

    def stop(self) -> None:
        """End `serve_forever` after the running call; calls that wait are not run. From any thread, or a handler."""
        self._stopping = True
        if not self._closed:
            self._listener.wake()

    def close(self) -> None:
        """Release the address, once a running call has ended.

        Not from a handler, or a signal handler of the serving thread, which would wait for itself: `stop` is for those.
        """
        if self._closed:
            return
        self.stop()
        self._closed = True
        self._needed.set()
        self._stand_in.join()
        with self._lock:
            self._listener.close()

    def _wait(self) -> None:
        """Wait at the socket for a message, unless the other thread has just taken what there was to wait for."""
        if self._requests or self._stopping:
            return
        self._away_since = None
        try:
            self._requests.extend(self._listener.wait(lambda: self._stopping))
        finally:
            self._away_since = self._called_at = time.monotonic()
            if not self._standing_by:
                self._standing_by = True
                self._needed.set()

    def _run(self, request: Request) -> Answer:
        handler = self._methods.get(request.method)
        try:
            if handler is None:
                return _unknown(request, self._methods)
            return result(request, handler(request.params, request.frames))
        except Exception as trouble:
            log.exception("RPC %s failed", request.method)
            return _failed(request, trouble)

    def _look_after_socket(self) -> None:
        """The other thread: between short calls it only sleeps, so that they cost nothing more."""
        while not self._closed:
            self._needed.wait(_STAND_IN_S if self._standing_by else None)
            self._needed.clear()
            now, away_since = time.monotonic(), self._away_since
            if away_since is None:
                self._standing_by = now - self._called_at < _STAND_BY_S
                # A call that came this moment may have found it True. (No `|=`: that could undo what the call sets.)
                if self._away_since is not None:
                    self._standing_by = True
            elif now - away_since >= _STAND_IN_S and self._lock.acquire(blocking=False):
                try:
                    self._requests.extend(self._listener.pump()[0])
                    self._listener.flush()
                finally:
                    self._lock.release()
