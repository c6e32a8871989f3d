"""A run directory with keys, and a hub that is driven by plain functions."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import ClientHello, ClientWelcome, Message, PoolAddrs
from miles_hpc.wire.rendezvous import Rendezvous, publish
from miles_hpc.wire.security import KeyPair, create_secrets, role_keys
from miles_hpc.wire.sockets import HubSocket, Received
from miles_hpc.wire.worker_env import WorkerEnv

Made = TypeVar("Made")
Reaction = Callable[[Message], "list[Message]"]
LOCALHOST = HostAndPort("127.0.0.1", 0)


class FakeHub:
    """A HubSocket in a thread: keeps what it receives, and answers with what `react` returns."""

    def __init__(self, run_dir: Path, epoch: int, react: Reaction, run_id: str) -> None:
        keys = KeyPair.generate()
        self.received: list[Received] = []
        self.socket = HubSocket(
            LOCALHOST, run_id=run_id, keys=keys, roles=role_keys(run_dir, 1), domain=f"hub-{id(self)}-{epoch}"
        )
        self.rendezvous = Rendezvous(
            run_id=run_id,
            attempt=1,
            epoch=epoch,
            addresses=["127.0.0.1"],
            port=self.socket.port,
            public_key=keys.public,
        )
        publish(run_dir, self.rendezvous)
        self._react = react
        self._changed = threading.Condition()
        self._stop = False
        self._paused = False
        self._woken = threading.Event()
        self._outbox: list[tuple[bytes, Message]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            if self._paused:
                self._woken.wait(10)
                continue
            self.socket.socket.poll(10)
            for received in self.socket.drain():
                for answer in self._react(received.message):
                    self.socket.send(received.peer, answer)
                with self._changed:
                    self.received.append(received)
                    self._changed.notify_all()
            while self._outbox:
                self.socket.send(*self._outbox.pop(0))
        self.socket.close()

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 20.0) -> list[Received]:
        """Messages of a kind, once there are `count` of them."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [item for item in self.received if isinstance(item.message, kind)]
                if len(found) >= count:
                    return found
                assert time.monotonic() < deadline, f"{count} x {kind.__name__} did not come: {self.received}"
                self._changed.wait(deadline - time.monotonic())

    def push(self, message: Message) -> None:
        """Send to the last program that said hello."""
        self._outbox.append((self.wait_for(ClientHello)[-1].peer, message))

    def pause(self) -> None:
        """Stand still from now on: connected, and silent."""
        self._paused = True

    def close(self) -> None:
        self._stop = True
        self._woken.set()
        self._thread.join()


def welcome(epoch: int, book: PoolAddrs | None = None) -> Reaction:
    """What a hub says to programs that say hello."""

    def react(message: Message) -> list[Message]:
        if not isinstance(message, ClientHello):
            return []
        greeting: list[Message] = [ClientWelcome(epoch=epoch, run_id="r1", attempt=1)]
        return [*greeting, book] if book else greeting

    return react


def once_free(bind: Callable[[], Made], timeout_s: float = 20.0) -> Made:
    """What `bind` returns once the address is free: ZeroMQ releases that of a closed socket a moment later."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return bind()
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        threading.Event().wait(0.01)


@pytest.fixture
def rebind() -> Callable[[Callable[[], Made]], Made]:
    return once_free


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    create_secrets(tmp_path, 1)
    return tmp_path


@pytest.fixture
def start_hub(run_dir: Path) -> Iterator[Callable[..., FakeHub]]:
    """start_hub(epoch, react=None, book=None, run_id="r1") -> FakeHub"""
    hubs: list[FakeHub] = []

    def start(
        epoch: int = 1, react: Reaction | None = None, book: PoolAddrs | None = None, run_id: str = "r1"
    ) -> FakeHub:
        hubs.append(FakeHub(run_dir, epoch, react or welcome(epoch, book), run_id))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


@pytest.fixture
def worker_env(run_dir: Path) -> WorkerEnv:
    return WorkerEnv(
        run_dir=run_dir,
        attempt=1,
        worker="driver-00000-00000",
        pool="driver",
        cell_index=0,
        worker_index=0,
        generation=Generation(1, 1),
        node="node-00000",
        listen={},
        master={},
        cell_size=1,
    )
