"""A router and engines of aiohttp, with the answers that the real ones were seen to give."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


class FakeEngine:
    """SGLang's control calls over a counter. `fail[path] = (status, body)` makes a path fail until it is removed."""

    def __init__(self) -> None:
        self.label = "default"
        self.path = "start"
        self.paused: str | None = None
        self.flushes = 0
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.fail: dict[str, tuple[int, Any]] = {}
        self.answers: list[Any] = []
        self.healthy = True
        self.session = False
        self.before: dict[str, Callable[[], None]] = {}
        """What happens just before a path is answered."""
        self.openapi: list[str] | None = None
        self.keys: set[str | None] = set()
        self.moves = True
        self.stamp = 0.0
        self.loads_wrong_label = False
        self.server: TestServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._on)
        self.server = TestServer(app, host="127.0.0.1")
        await self.server.start_server()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()

    async def _on(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls.append(path)
        self.before.get(path, lambda: None)()
        self.keys.add(request.headers.get("Authorization"))
        body = await request.json() if request.can_read_body else {}
        self.bodies.append(body)
        if path in self.fail:
            status, failure = self.fail[path]
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.json_response(failure, status=status)
        if path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if path == "/openapi.json" and self.openapi is not None:
            return web.json_response({"paths": {path: {} for path in self.openapi}})
        if path == "/model_info":
            return web.json_response({"model_path": self.path, "weight_version": self.label})
        if path == "/ready":
            return web.Response(status=503 if self.paused else 200)
        if path == "/v1/loads":
            if self.moves and self.paused is None:
                self.stamp += 1.0
            return web.json_response({"loads": [{"timestamp": self.stamp}]})
        if path == "/server_info":
            if not self.moves:
                await asyncio.sleep(60)
            return web.json_response({})
        if path.endswith("_weights_update_group"):
            return web.json_response({"success": True, "message": "Success"})
        if path.endswith("_weight_update"):
            begins = path.startswith("/begin")
            fits, self.session = self.session != begins, begins
            return web.json_response({"success": fits, "message": "a session"}, status=200 if fits else 400)
        if path == "/update_weights_from_distributed":
            self.label = body.get("weight_version", self.label)
            return web.json_response({"success": True, "message": "Success"})
        if path == "/pause_generation":
            self.paused = body.get("mode", "abort")
        elif path == "/continue_generation":
            self.paused = None
        elif path == "/flush_cache":
            self.flushes += 1
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/update_weights_from_disk":
            self.path = body["model_path"]
            if not self.loads_wrong_label:
                self.label = body["weight_version"]
            return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})
        elif path == "/generate":
            return web.json_response(self.answers.pop(0) if self.answers else answer(body["input_ids"], self.label))
        return web.Response()


def answer(input_ids: list[int], label: str = "1", reason: str = "stop", **changes: Any) -> dict[str, Any]:
    """A `/generate` answer: the prompt backwards."""
    ids = list(reversed(input_ids))
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-0.5 * i, token, None] for i, token in enumerate(ids)],
        "weight_version": label,
        "weight_versions": [{"version": label, "start": 0, "end": len(ids)}],
    }
    return {"text": "back", "output_ids": ids, "meta_info": meta | changes}


class FakeRouter:
    """sglang-router 0.3.2: additions and removals are queued, `/generate` goes round the healthy ones."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        self.delay_s = 0.0
        self.answers: list[tuple[int, Any]] = []
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.hang = False
        self.too_old = False
        self.calls: list[str] = []
        self.worker_keys: dict[str, str] = {}
        self.server: TestServer | None = None
        self._turn = 0
        self._ids: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    async def start(self, port: int | None = None) -> None:
        app = web.Application()
        app.router.add_get("/workers", self._on_list)
        app.router.add_post("/workers", self._on_add)
        app.router.add_delete("/workers/{id}", self._on_delete)
        app.router.add_post("/generate", self._on_generate)
        self.server = TestServer(app, host="127.0.0.1", port=port)
        await self.server.start_server()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()

    def listed(self) -> set[str]:
        return {worker["url"] for worker in self.workers.values()}

    async def _on_list(self, request: web.Request) -> web.Response:
        if self.too_old:
            return web.Response(status=404)
        return web.json_response({"workers": list(self.workers.values()), "total": len(self.workers)})

    async def _on_add(self, request: web.Request) -> web.Response:
        body = await request.json()
        url = body["url"]
        self.calls.append(f"add {url}")
        self.worker_keys[url] = body.get("api_key", "")
        worker_id = self._ids.setdefault(url, str(uuid.uuid4()))

        async def register() -> None:
            await asyncio.sleep(self.delay_s)
            self.workers[worker_id] = {"id": worker_id, "url": url, "is_healthy": True}

        self._tasks.append(asyncio.ensure_future(register()))
        return web.json_response({"status": "accepted", "worker_id": worker_id, "url": url}, status=202)

    async def _on_delete(self, request: web.Request) -> web.Response:
        worker = self.workers.get(request.match_info["id"])
        if worker is None:
            return web.json_response({"code": "WORKER_NOT_FOUND"}, status=404)
        self.calls.append(f"remove {worker['url']}")

        async def remove() -> None:
            await asyncio.sleep(self.delay_s)
            self.workers.pop(worker["id"], None)
            self._ids.pop(worker["url"], None)

        self._tasks.append(asyncio.ensure_future(remove()))
        return web.json_response({"status": "accepted"}, status=202)

    async def _on_generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((body, dict(request.headers)))
        if self.hang:
            await asyncio.sleep(60)
        if self.answers:
            status, answered = self.answers.pop(0)
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.json_response(answered, status=status)
        healthy = [worker["url"] for worker in self.workers.values() if worker["is_healthy"]]
        if not healthy:
            error = {"type": "Service Unavailable", "code": "no_available_workers", "message": "No available workers"}
            return web.json_response({"error": error}, status=503)
        self._turn += 1
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{healthy[self._turn % len(healthy)]}/generate", json=body) as found:
                return web.Response(status=found.status, body=await found.read(), content_type="application/json")


class Parts:
    """Starts engines and routers, and stops what it started."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self._started: list[FakeEngine | FakeRouter] = []

    async def engine(self) -> FakeEngine:
        engine = FakeEngine()
        await engine.start()
        self._started.append(engine)
        return engine

    async def router(self, *engines: FakeEngine, port: int | None = None) -> FakeRouter:
        router = FakeRouter()
        await router.start(port)
        for index, engine in enumerate(engines):
            router.workers[f"w{index}"] = {"id": f"w{index}", "url": engine.url, "is_healthy": True}
        self._started.append(router)
        return router

    async def stop(self) -> None:
        for part in reversed(self._started):
            await part.stop()


@contextlib.asynccontextmanager
async def _parts() -> AsyncIterator[Parts]:
    from miles_hpc.inference.http_session import open_http

    async with open_http() as http:
        parts = Parts(http)
        try:
            yield parts
        finally:
            await parts.stop()


@pytest.fixture
def parts() -> Any:
    """`async with parts() as p:` inside `asyncio.run`."""
    return _parts


@pytest.fixture
def make_answer() -> Any:
    return answer
