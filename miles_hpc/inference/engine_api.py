"""The control calls of one engine, in SGLang's HTTP API (0.5.23, and the embedded engines)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp

from miles_hpc.inference.http_session import brief
from miles_hpc.inference.needs import NEEDED_CALLS

PauseMode = Literal["retract", "abort", "in_place"]
UNPUBLISHED = -1
"""Version of an engine whose label no one of ours has set (SGLang starts with `default`)."""

_NOT_FLUSHED = "cache was not flushed"


class EngineError(RuntimeError):
    """A call to an engine did not do what it should."""


class EngineUnreachable(EngineError):
    """No answer: the engine is gone, or it did not answer within the deadline."""


class EngineRefused(EngineError):
    """The engine answered with an error status."""

    def __init__(self, text: str, status: int, body: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = body


class EngineTooOld(RuntimeError):
    """The engine lacks calls that are needed: no restart helps."""

    def __init__(self, url: str, missing: Sequence[str]) -> None:
        super().__init__(f"the engine at {url} lacks {', '.join(missing)}: install SGLang 0.5.23 or newer")


class CacheNotFlushed(EngineRefused):
    """The weights are new, but the old KV cache is still there and the label is the old one."""


def version_of(label: object) -> int:
    """The weight version that a label names; `UNPUBLISHED` when it is not one of ours."""
    text = str(label)
    return int(text) if text.isascii() and text.isdigit() else UNPUBLISHED


class EngineApi:
    """Control calls to the engine at `url`; each raises EngineUnreachable or EngineRefused.

    Args:
        url: `http://host:port`.
        http: the caller's client; it is not closed here.
        timeout_s: deadline of a call that does not name its own.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, *, timeout_s: float = 30.0) -> None:
        self.url = url
        self._http = http
        self._timeout_s = timeout_s

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Whether `/health` answers 200 within the deadline; never raises for an engine that does not."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """`/model_info`: at least `model_path` and `weight_version`."""
        return await self._json("GET", "/model_info", timeout_s=timeout_s)

    async def missing_calls(self, *, timeout_s: float | None = None) -> list[str]:
        """Which of `NEEDED_CALLS` the engine's OpenAPI page does not have; none for an engine without that page."""
        try:
            paths = (await self._json("GET", "/openapi.json", timeout_s=timeout_s)).get("paths")
        except EngineUnreachable:
            raise
        except EngineError:
            return []
        return [path for path in NEEDED_CALLS if path not in paths] if isinstance(paths, dict) else []

    async def weight_version(self, *, timeout_s: float | None = None) -> int:
        """The version that the engine says it serves, `UNPUBLISHED` for a label that is not ours."""
        return version_of((await self.model_info(timeout_s=timeout_s)).get("weight_version"))

    async def paused(self, *, timeout_s: float = 5.0) -> bool:
        """Whether `/ready` answers 503; an engine without `/ready` does not tell."""
        try:
            await self._call("GET", "/ready", timeout_s=timeout_s)
        except EngineRefused as error:
            return error.status == 503
        return False

    async def ready(self) -> bool:
        """Whether `/ready` answers 200: it would serve a request now."""
        try:
            await self._call("GET", "/ready")
        except EngineRefused:
            return False
        return True

    async def loads_stamp(self, *, timeout_s: float | None = None) -> float:
        """When the scheduler last said what it does (its wall clock); stands still while paused or stopped."""
        loads = (await self._json("GET", "/v1/loads", timeout_s=timeout_s)).get("loads")
        try:
            return max(float(load["timestamp"]) for load in loads or [])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"GET {self.url}/v1/loads: expected loads with a timestamp, found {loads!r}") from error

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """`/server_info`: asks the scheduler, so it hangs when that is stopped. Holds keys: not to be printed."""
        return await self._json("GET", "/server_info", timeout_s=timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. `retract` keeps running requests for later, `abort` ends them, `in_place` freezes them."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Generate again."""
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop all cached KV; an engine with live requests answers 400 (EngineRefused)."""
        await self._call("POST", "/flush_cache")

    async def update_weights_from_disk(
        self, path: str, version: int, *, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load the HF directory `path` and label it `version`.

        Raises:
            CacheNotFlushed: when the weights were taken but the flush was refused; the label is then the old one.
            EngineRefused: when they were not taken; the old weights keep serving.
        """
        # Without `weight_version` the old label would stay on the new weights.
        payload = {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache}
        try:
            answer = await self._json("POST", "/update_weights_from_disk", payload, timeout_s=timeout_s)
        except EngineRefused as error:
            if _NOT_FLUSHED in error.body:
                raise CacheNotFlushed(str(error), error.status, error.body) from error
            raise
        if not answer.get("success", False):
            text = f"{self.url}: weights from {path} were not taken: {answer.get('message', answer)}"
            raise EngineRefused(text, 200, json.dumps(answer))

    async def update_weight_version(self, version: int) -> None:
        """Set the label alone."""
        # The default of abort_all_requests is true and would end everything in flight.
        await self._call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def init_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Join a weight update group as ranks `rank_offset`…; returns when all members are there."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._done("/init_weights_update_group", body, timeout_s)

    async def destroy_group(self, name: str, *, timeout_s: float = 30.0) -> None:
        """Leave a weight update group."""
        await self._done("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def begin_update(self) -> None:
        """Open a session of updates; EngineRefused when one is open."""
        await self._done("/begin_weight_update", {}, None)

    async def end_update(self, *, timeout_s: float | None = None) -> None:
        """Close the session; EngineRefused when none is open."""
        await self._done("/end_weight_update", {}, timeout_s)

    async def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        *,
        group: str,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Take tensors that rank 0 of the group broadcasts meanwhile; the label changes when `version` is given."""
        label = {} if version is None else {"weight_version": str(version)}
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group, "flush_cache": flush_cache}
        await self._done("/update_weights_from_distributed", {**body, **label}, timeout_s)

    async def checksums(self, *, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Checksum of every tensor, by rank."""
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
        return list(answer.get("ranks") or [])

    async def _done(self, path: str, body: dict[str, Any], timeout_s: float | None) -> None:
        answer = await self._json("POST", path, body, timeout_s=timeout_s)
        if not answer.get("success", False):
            text = f"POST {self.url}{path}: {answer.get('message', answer)}"
            raise EngineRefused(text, 200, json.dumps(answer))

    async def abort_all(self) -> None:
        """End every request; each returns what it has, with finish reason `abort`."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def generate(self, payload: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """One `/generate` request straight to this engine."""
        return await self._json("POST", "/generate", payload, timeout_s=timeout_s)

    async def _json(
        self, method: str, path: str, payload: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        text = await self._call(method, path, payload, timeout_s=timeout_s)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise EngineError(f"{method} {self.url}{path}: expected JSON, found {brief(text)!r}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{method} {self.url}{path}: expected a JSON object, found {brief(text)!r}")
        return answer

    async def _call(
        self, method: str, path: str, payload: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> str:
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._http.request(method, self.url + path, json=payload, timeout=timeout) as response:
                text = await response.text()
        except asyncio.TimeoutError as error:
            raise EngineUnreachable(f"{method} {self.url}{path}: no answer within {deadline_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            what = f"{method} {self.url}{path}: expected 200, found {response.status}: {brief(text)}"
            raise EngineRefused(what, response.status, text)
        return text
