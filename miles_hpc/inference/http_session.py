"""The HTTP client that all programs of ours use towards engines, routers and session servers."""

from __future__ import annotations

import aiohttp

CONNECT_TIMEOUT_S = 5.0


def open_http() -> aiohttp.ClientSession:
    """A client without a connection bound, to be closed by its owner.

    Internal traffic ignores the `*_proxy` variables (`trust_env=False`): a site's proxy knows no compute node.
    Calls carry their own deadlines, so none is set for a whole request, only for connecting.
    """
    return aiohttp.ClientSession(
        trust_env=False,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


def brief(body: str, limit: int = 300) -> str:
    """A body for an error text: one line, at most `limit` characters."""
    line = " ".join(body.split())
    return line if len(line) <= limit else f"{line[:limit]}… ({len(body)} characters)"
