"""The worker list of one sglang-router (0.3.2): adding is asynchronous, so it is confirmed by looking."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from miles_hpc.inference.http_session import brief

_POLL_S = 0.05


class RouterError(RuntimeError):
    """A call to a router did not do what it should."""


class RouterUnreachable(RouterError):
    """No answer from the router."""


class RouterTooOld(RouterError):
    """The router has no worker API that we know."""


class RouterWorker(msgspec.Struct, frozen=True):
    """One engine in a router's list."""

    id: str
    url: str
    healthy: bool


def base_url(url: str) -> str:
    """The engine's address in a listed url: a data-parallel router lists `url@rank`."""
    return url.rstrip("/").split("@", 1)[0]


class RouterApi:
    """The list of the router at `url`; the caller's `http` is not closed here.

    Args:
        worker_key: the key that an engine asks for, by its url; the router sends it with what it passes on.
    """

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        *,
        timeout_s: float = 10.0,
        worker_key: Callable[[str], str] = lambda url: "",
    ) -> None:
        self.url = url
        self._http = http
        self._timeout_s = timeout_s
        self._worker_key = worker_key

    async def workers(self) -> list[RouterWorker]:
        """What the router lists now.

        Raises:
            RouterTooOld: when it answers 404: until 0.3 there were other calls.
        """
        answer = await self._call("GET", "/workers", expect=(200, 404))
        if "workers" not in answer:
            raise RouterTooOld(f"GET {self.url}/workers: no such call: install sglang-router 0.3.2 or newer")
        try:
            return [RouterWorker(w["id"], base_url(w["url"]), bool(w["is_healthy"])) for w in answer["workers"]]
        except (KeyError, TypeError) as error:
            raise RouterError(
                f"GET {self.url}/workers: expected workers with id, url, is_healthy: {error!r}"
            ) from error

    async def add(self, url: str) -> None:
        """Ask for `url` to be listed. Idempotent. 202 says queued: `workers` tells when it is active."""
        key = self._worker_key(url)
        await self._call("POST", "/workers", {"url": url, **({"api_key": key} if key else {})}, expect=(200, 201, 202))

    async def remove(self, url: str, *, timeout_s: float = 10.0) -> None:
        """Take `url` from the list and wait until it is gone; one that is not listed is fine.

        Requests in flight to it are left to finish; new ones go elsewhere at once.
        """
        for worker in await self.workers():
            if worker.url == base_url(url):
                await self._call("DELETE", f"/workers/{worker.id}", expect=(200, 202, 204, 404))
        deadline = time.monotonic() + timeout_s
        while any(worker.url == base_url(url) for worker in await self.workers()):
            if time.monotonic() >= deadline:
                raise RouterError(f"router {self.url}: {url} is still listed {timeout_s:g} s after its removal")
            await asyncio.sleep(_POLL_S)

    async def _call(
        self, method: str, path: str, payload: dict[str, Any] | None = None, *, expect: tuple[int, ...]
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with self._http.request(method, self.url + path, json=payload, timeout=timeout) as response:
                text = await response.text()
        except asyncio.TimeoutError as error:
            raise RouterUnreachable(f"{method} {self.url}{path}: no answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise RouterUnreachable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status not in expect:
            raise RouterError(f"{method} {self.url}{path}: expected {expect}, found {response.status}: {brief(text)}")
        try:
            answer = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise RouterError(f"{method} {self.url}{path}: expected JSON, found {brief(text)!r}") from error
        return answer if isinstance(answer, dict) else {}
