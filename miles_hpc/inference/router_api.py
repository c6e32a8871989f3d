"""The worker list of one sglang-router (0.3.2): adding is asynchronous, so it is confirmed by looking."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import msgspec

from miles_hpc.inference.http_session import brief

_POLL_S = 0.05


class RouterError(RuntimeError):
    """A call to a router did not do what it should."""


class RouterUnreachable(RouterError):
    """No answer from the router."""


class RegistrationTimeout(RouterError):
    """The router did not list the engine as healthy, or did not drop it, within the deadline."""


class RouterWorker(msgspec.Struct, frozen=True):
    """One engine in a router's list."""

    id: str
    url: str
    healthy: bool


def base_url(url: str) -> str:
    """The engine's address in a listed url: a data-parallel router lists `url@rank`."""
    return url.rstrip("/").split("@", 1)[0]


class RouterApi:
    """The list of the router at `url`; the caller's `http` is not closed here."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, timeout_s: float = 10.0) -> None:
        self.url = url
        self._http = http
        self._timeout_s = timeout_s

    async def workers(self) -> list[RouterWorker]:
        """What the router lists now."""
        answer = await self._call("GET", "/workers", expect=(200,))
        try:
            return [RouterWorker(w["id"], base_url(w["url"]), bool(w["is_healthy"])) for w in answer["workers"]]
        except (KeyError, TypeError) as error:
            raise RouterError(
                f"GET {self.url}/workers: expected workers with id, url, is_healthy: {error!r}"
            ) from error

    async def add(self, url: str) -> None:
        """Ask for `url` to be listed. The answer 202 says queued, not active: `wait_active` tells. Idempotent."""
        await self._call("POST", "/workers", {"url": url}, expect=(200, 201, 202))

    async def register(self, url: str, *, timeout_s: float) -> None:
        """Add `url` and wait until it is listed as healthy.

        Raises:
            RegistrationTimeout: when it is not within `timeout_s`.
        """
        await self.add(url)
        await self._poll(url, timeout_s, "listed as healthy", lambda found: any(w.healthy for w in found))

    async def remove(self, url: str, *, timeout_s: float = 10.0) -> None:
        """Take `url` from the list and wait until it is gone; one that is not listed is fine.

        Requests in flight to it are left to finish; new ones go elsewhere at once.
        """
        for worker in await self.workers():
            if worker.url == base_url(url):
                await self._call("DELETE", f"/workers/{worker.id}", expect=(200, 202, 204, 404))
        await self._poll(url, timeout_s, "gone from the list", lambda found: not found)

    async def _poll(self, url: str, timeout_s: float, what: str, done: Any) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            found = [w for w in await self.workers() if w.url == base_url(url)]
            if done(found):
                return
            if time.monotonic() >= deadline:
                seen = "not listed" if not found else "listed, " + ("healthy" if found[0].healthy else "not healthy")
                raise RegistrationTimeout(f"router {self.url}: {url} was not {what} within {timeout_s:g} s ({seen})")
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
