"""A streamed `/generate` answer: read to its `[DONE]`, with a watch on silence that asks the engines before it judges.

A node that lost power closes no connection, and no header says which engine works on a request. So there are two signs
of a lost one: an engine left the address book and nothing came since, or nothing came for long although no engine has
a reason to keep a request waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from miles_hpc.inference.http_session import Withdrawn
from miles_hpc.wire.ids import Generation

IDLE_S = 30.0
"""Silence after which the engines are asked whether one of them has a reason for it."""
SUSPECT_S = 5.0
"""Silence after which a request is given up once any engine has left the address book."""
_LOOK_S = 1.0
_ASK_TIMEOUT_S = 5.0

EngineBook = Mapping[tuple[str, Generation], str]
"""The living engines: (cell, generation) -> url."""


class StreamCut(ConnectionError):
    """The stream ended without `[DONE]`: whoever worked on it is gone."""


class Silent(ConnectionError):
    """Nothing came for too long; the text says what was known of the engines."""


class Pulse:
    """When something last came for one request."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def beat(self) -> None:
        self.at = time.monotonic()


async def read_answer(response: aiohttp.ClientResponse, pulse: Pulse) -> tuple[int, bytes]:
    """Status and body of a `/generate` answer; of a stream the last event, which is the whole answer.

    Raises:
        StreamCut: when a stream ended without `[DONE]`.
    """
    if response.content_type != "text/event-stream":
        return response.status, await response.read()
    buffer, last = bytearray(), b""
    async for piece in response.content.iter_any():
        pulse.beat()
        buffer += piece
        end = buffer.rfind(b"\n\n")
        if end < 0:
            continue
        for line in buffer[:end].split(b"\n"):
            if line.startswith(b"data: [DONE]"):
                # An error that comes up after the status was sent is an event of its own.
                return (400 if last.startswith(b'{"error"') else response.status), last
            if line.startswith(b"data: "):
                last = bytes(line[6:])
        del buffer[: end + 2]
    raise StreamCut(f"the stream ended after {len(last)} bytes without [DONE]")


class SilenceWatch:
    """Whether the silence of requests means that they are lost; shared by all requests of a client.

    Args:
        engines: the living engines, asked anew each time; None when they are not known, then only deadlines end a wait.
        http: the caller's client.
    """

    def __init__(
        self,
        engines: Callable[[], EngineBook] | None,
        http: aiohttp.ClientSession,
        *,
        idle_s: float = IDLE_S,
        suspect_s: float = SUSPECT_S,
    ) -> None:
        self._engines = engines
        self._http = http
        self._idle_s = idle_s
        self._suspect_s = suspect_s
        self._asked_at = float("-inf")
        self._reason = ""
        self._asking: asyncio.Lock | None = None

    async def follow(
        self, call: Awaitable[tuple[int, bytes]], pulse: Pulse, listed: Callable[[], bool], timeout_s: float
    ) -> tuple[int, bytes]:
        """The result of `call`, which is cancelled when it is lost.

        Raises:
            Withdrawn: the router left the address book.
            Silent: nothing comes any more.
            asyncio.TimeoutError: after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        known = self._living()
        gone_at = 0.0
        running = asyncio.ensure_future(call)
        try:
            while True:
                left = deadline - time.monotonic()
                done, _ = await asyncio.wait({running}, timeout=max(0.0, min(left, _LOOK_S)))
                if done:
                    return running.result()
                now = time.monotonic()
                if left <= 0:
                    raise asyncio.TimeoutError
                if not listed():
                    raise Withdrawn
                living = self._living()
                if not known <= living:
                    gone_at, known = now, living
                else:
                    known = living
                if gone_at and pulse.at > gone_at:
                    gone_at = 0.0  # it comes from another engine
                if gone_at and now - max(gone_at, pulse.at) >= self._suspect_s:
                    raise Silent(f"nothing came for {now - pulse.at:.0f} s, and an engine left the address book")
                if now - pulse.at >= self._idle_s and not await self._explained():
                    raise Silent(f"nothing came for {now - pulse.at:.0f} s, and every engine answers and is not busy")
        finally:
            running.cancel()

    def _living(self) -> frozenset[tuple[str, Generation]]:
        return frozenset(self._engines()) if self._engines is not None else frozenset()

    async def _explained(self) -> bool:
        """Whether an engine is paused, has a queue, or does not answer (its node's silence is the hub's to judge)."""
        if self._engines is None:
            return True
        if self._asking is None:
            self._asking = asyncio.Lock()
        async with self._asking:
            if time.monotonic() - self._asked_at < self._suspect_s:
                return bool(self._reason)
            urls = list(self._engines().values())
            reasons = await asyncio.gather(*map(self._reason_of, urls))
            self._asked_at = time.monotonic()
            self._reason = next(filter(None, reasons), "" if urls else "no engine is known")
            return bool(self._reason)

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
