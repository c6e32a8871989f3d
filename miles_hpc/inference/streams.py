"""A streamed `/generate` answer: read to its `[DONE]`, with a watch on silence that asks the engines before it judges.

A node that lost power closes no connection, and no header says which engine works on a request. So there are two signs
of a lost one: an engine left the address book and nothing came since, or nothing came for long although no engine has
a reason to keep a request waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp

from miles_hpc.inference.http_session import Withdrawn
from miles_hpc.inference.merging import Events
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.time_limit import settled

T = TypeVar("T")

IDLE_S = 30.0
"""Silence after which the engines are asked whether one of them has a reason for it."""
SUSPECT_S = 5.0
"""Silence after which a request is given up once any engine has left the address book; twice the longest pause that its
stream has made, if that is longer."""
_LOOK_S = 1.0
_ASK_TIMEOUT_S = 5.0
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_DATA, _DONE, _EVENT_END = b"data: ", b"data: [DONE]", b"\n\n"

EngineBook = Mapping[tuple[str, Generation], str]
"""The living engines: (cell, generation) -> url."""


class StreamCut(ConnectionError):
    """The stream ended without `[DONE]`: whoever worked on it is gone."""


class Silent(ConnectionError):
    """Nothing came for too long; the text says what was known of the engines."""


async def read_answer(response: aiohttp.ClientResponse, pulse: Waiting) -> tuple[int, list[bytes]]:
    """Status and body of a `/generate` answer; of a stream the events that make the whole answer.

    Raises:
        StreamCut: when a stream ended without `[DONE]`.
    """
    if response.content_type != "text/event-stream":
        return response.status, [await response.read()]
    _acknowledge(response)
    buffer, ended, content, events = b"", False, response.content, Events()
    while piece := await content.readany():
        pulse.beat()
        # An end of an event may lie across two pieces.
        searched = max(0, len(buffer) - 1)
        buffer = buffer + piece if buffer else piece
        if buffer.find(_EVENT_END, searched) < 0:
            continue
        *whole, buffer = buffer.split(_EVENT_END)
        for event in whole:
            if event.startswith(_DONE):
                ended = True
            elif event.startswith(_DATA):
                events.take(event[len(_DATA) :])
        if ended:
            # A connection can be used again once it is read to the end of the body, which comes at once.
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await content.readany()
            # An error that comes up after the status was sent is an event of its own.
            error = bool(events.needed) and events.needed[-1].startswith(b'{"error"')
            return (400, events.needed[-1:]) if error else (response.status, events.needed)
    raise StreamCut(f"the stream ended after {sum(map(len, events.needed))} bytes without [DONE]")


def _acknowledge(response: aiohttp.ClientResponse) -> None:
    """Acknowledge the head now: the router (0.3.2) writes head and body apart, with Nagle's algorithm on, so the body
    waits for this, and by itself the kernel takes 40 ms for it."""
    connection = response.connection
    wire = connection.transport.get_extra_info("socket") if connection and connection.transport else None
    if wire is not None and _QUICKACK is not None:
        with contextlib.suppress(OSError):
            wire.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


class Waiting:
    """One request in flight: it is cancelled when it is lost."""

    __slots__ = ("_begun", "_task", "_watch", "at", "deadline", "gone_at", "pause", "url", "verdict")

    def __init__(self, watch: SilenceWatch, url: str, deadline: float) -> None:
        self._watch = watch
        self.url = url
        self.deadline = deadline
        self.at = time.monotonic()
        """When something last came."""
        self._begun = False
        self.pause = 0.0
        """The longest time between two things that came; what came first may have waited in a queue."""
        self.gone_at = 0.0
        """When an engine left the address book after that; earlier than `at`: none did."""
        self.verdict: BaseException | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, in a task of its own that has ended when this ends.

        Raises:
            Withdrawn: the router left the address book.
            Silent: nothing comes any more.
            asyncio.TimeoutError: its deadline passed.
        """
        try:
            self._watch.enter(self)
        except BaseException:
            work.close()
            raise
        self._task = asyncio.ensure_future(work)
        try:
            await settled(self._task)
        finally:
            self._watch.leave(self)
        if self.verdict is not None and self._task.cancelled():
            raise self.verdict
        return self._task.result()

    def beat(self) -> None:
        """Something came."""
        now = time.monotonic()
        if self._begun:
            self.pause = max(self.pause, now - self.at)
        self._begun, self.at = True, now

    def give_up(self, verdict: BaseException) -> None:
        """End it with `verdict`; a request that ended already is left alone."""
        if self._watch.leave(self):
            self.verdict = verdict
            self._task.cancel()


class SilenceWatch:
    """Whether the silence of requests means that they are lost; one timer for all requests of a client.

    Args:
        router_url: where the router is now; a request to another address is given up.
        engines: the living engines, asked anew each time; None when they are not known, then only deadlines end a wait.
        http: the caller's client.
    """

    def __init__(
        self,
        router_url: Callable[[], str | None],
        engines: Callable[[], EngineBook] | None,
        http: aiohttp.ClientSession,
        *,
        idle_s: float = IDLE_S,
        suspect_s: float = SUSPECT_S,
    ) -> None:
        self._router_url = router_url
        self._engines = engines
        self._http = http
        self._idle_s = idle_s
        self._suspect_s = suspect_s
        self._in_flight: set[Waiting] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._known: frozenset[tuple[str, Generation]] = frozenset()
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def over(self, url: str, deadline: float) -> Waiting:
        """A watch over one request to the router at `url` until `deadline` on the monotonic clock."""
        return Waiting(self, url, deadline)

    def enter(self, one: Waiting) -> None:
        """A request begins."""
        if not self._in_flight:
            self._known = self._living()
        self._in_flight.add(one)
        look_at = min(one.at + _LOOK_S, one.deadline)
        if self._timer is None:
            self._look_at(look_at)
        elif one.deadline < self._timer.when():
            self._timer.cancel()
            self._look_at(look_at)

    def leave(self, one: Waiting) -> bool:
        """It ends; whether it was in flight until now."""
        if one not in self._in_flight:
            return False
        self._in_flight.remove(one)
        if not self._in_flight and self._asking is not None:
            self._asking.cancel()
            self._asking = None
        return True

    def _look_at(self, when: float) -> None:
        # The loop's clock is the monotonic one.
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._in_flight:
            return
        now, url, living = time.monotonic(), self._router_url(), self._living()
        one_left, self._known = not self._known <= living, living
        silent = False
        for one in list(self._in_flight):
            if one.deadline <= now:
                one.give_up(asyncio.TimeoutError())
            elif one.url != url:
                one.give_up(Withdrawn())
            elif one_left and one.gone_at <= one.at:
                one.gone_at = now
            elif one.gone_at > one.at and now - one.gone_at >= max(self._suspect_s, 2 * one.pause):
                text = f"nothing came for {now - one.at:.0f} s, and an engine left the address book"
                one.give_up(Silent(text))
            silent = silent or now - one.at >= self._idle_s
        if silent and self._engines is not None and self._asking is None and now - self._asked_at >= self._suspect_s:
            self._asking = asyncio.ensure_future(self._ask(self._engines))
            self._asking.add_done_callback(self._asked)
        self._look_at(min([now + _LOOK_S, *(one.deadline for one in self._in_flight)]))

    def _living(self) -> frozenset[tuple[str, Generation]]:
        return frozenset(self._engines()) if self._engines is not None else frozenset()

    async def _ask(self, engines: Callable[[], EngineBook]) -> None:
        """Give up what is silent, unless an engine is paused, has a queue, or does not answer (its node's silence is
        the hub's to judge)."""
        urls = list(engines().values())
        reasons = await asyncio.gather(*map(self._reason_of, urls))
        now = self._asked_at = time.monotonic()
        if any(reasons) or not urls:
            return
        for one in list(self._in_flight):
            if now - one.at >= self._idle_s:
                text = f"nothing came for {now - one.at:.0f} s, and every engine answers and is not busy"
                one.give_up(Silent(text))

    def _asked(self, asking: asyncio.Task[None]) -> None:
        if self._asking is asking:
            self._asking = None

    async def _reason_of(self, url: str) -> str:
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        try:
            async with self._http.get(f"{url}/ready", timeout=timeout) as ready:
                if ready.status == 503:
                    return f"{url} is paused"
            async with self._http.get(f"{url}/v1/loads", timeout=timeout) as answer:
                loads = (await answer.json())["loads"]
            return f"{url} has a queue" if any(load["num_waiting_reqs"] for load in loads) else ""
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError):
            return f"{url} does not answer"
