"""The HTTP client that all programs of ours use towards engines, routers and session servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

CONNECT_TIMEOUT_S = 5.0
_LOOK_S = 1.0

T = TypeVar("T")


class Withdrawn(ConnectionError):
    """The peer of a call left the address book while the call was in flight."""


def open_http(key: str = "") -> aiohttp.ClientSession:
    """A client without a connection bound, to be closed by its owner.

    Internal traffic ignores the `*_proxy` variables (`trust_env=False`): a site's proxy knows no compute node.
    Calls carry their own deadlines, so none is set for a whole request, only for connecting.

    Args:
        key: the run's HTTP key (`security.load_http_key`), sent with every request.
    """
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        trust_env=False,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


def brief(body: str, limit: int = 300) -> str:
    """A body for an error text: one line, at most `limit` characters."""
    line = " ".join(body.split())
    return line if len(line) <= limit else f"{line[:limit]}… ({len(body)} characters)"


async def while_listed(call: Awaitable[T], listed: Callable[[], bool], timeout_s: float) -> T:
    """The result of `call`, which is cancelled when its peer leaves the address book.

    A node that lost power closes no connection; leaving the address book is the only sign of it.

    Raises:
        Withdrawn: when `listed()` turned false.
        asyncio.TimeoutError: after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    running = asyncio.ensure_future(call)
    try:
        while True:
            left = deadline - time.monotonic()
            done, _ = await asyncio.wait({running}, timeout=max(0.0, min(left, _LOOK_S)))
            if done:
                return running.result()
            if left <= 0:
                raise asyncio.TimeoutError
            if not listed():
                raise Withdrawn
    finally:
        running.cancel()
