"""The HTTP client that all programs of ours use towards engines, routers and session servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
from yarl import URL

from miles_hpc.config.schema import Config
from miles_hpc.wire.security import load_http_key, read_engine_key

CONNECT_TIMEOUT_S = 5.0
_LOOK_S = 1.0

T = TypeVar("T")


class Withdrawn(ConnectionError):
    """The peer of a call left the address book while the call was in flight."""


@dataclass(frozen=True)
class HttpKeys:
    """Who is sent which key: `run` to everyone, except those of `engines` (base url -> key, empty: none)."""

    run: str = field(default="", repr=False)
    engines: Mapping[str, str] = field(default_factory=dict, repr=False)

    def of(self, url: str) -> str:
        """The key for a base url."""
        return self.engines.get(url.rstrip("/"), self.run)


def http_keys(config: Config, run_dir: Path, attempt: int) -> HttpKeys:
    """All keys of a run's HTTP servers, those of external engines from their files.

    Raises:
        SecurityError: when a file is missing, unreadable, or others may read it.
    """
    tables = [config.inference.external, *(model.external for model in config.models.values())]
    engines = {
        engine.url.rstrip("/"): read_engine_key(Path(engine.key_file)) if engine.key_file else ""
        for table in tables
        for engine in table.values()
    }
    return HttpKeys(load_http_key(run_dir, attempt), engines)


def open_http(key: str | HttpKeys = "") -> aiohttp.ClientSession:
    """A client without a connection bound, to be closed by its owner.

    Internal traffic ignores the `*_proxy` variables (`trust_env=False`): a site's proxy knows no compute node.
    Calls carry their own deadlines, so none is set for a whole request, only for connecting.

    Args:
        key: the run's HTTP key (`security.load_http_key`), sent with every request; or all keys, each to its own.
    """
    keys = HttpKeys(key) if isinstance(key, str) else key
    tracing = aiohttp.TraceConfig()
    tracing.on_request_start.append(_other_key(keys))
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {keys.run}"} if keys.run else None,
        trace_configs=[tracing] if keys.engines else None,
        trust_env=False,
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


def _other_key(keys: HttpKeys) -> Callable[..., Awaitable[None]]:
    """Replaces the run's key in requests to engines that have another one, or none."""
    # A request's url is in normal form (lower case, IPv6 compressed), which the config's text need not be.
    named = {str(URL(url).origin()): key for url, key in keys.engines.items()}

    async def replace(session: object, context: object, request: aiohttp.TraceRequestStartParams) -> None:
        base = str(request.url.origin())
        if base in named:
            request.headers.popall("Authorization", None)
            if named[base]:
                request.headers["Authorization"] = f"Bearer {named[base]}"

    return replace


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
