"""The HTTP API of an engine, in SGLang 0.5.23's shapes, over any backend.

Known differences from SGLang, on purpose: `/health` answers at once, busy or paused (SGLang generates a token for it,
unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0); an out-of-range token id is a 400 (it kills SGLang); `stream` is for
one sequence, its events come by time, not by token, and incremental ones have the text in the last; seeds count (SGLang
ignores them by default), and the n samples of a seeded request get n of them; a stop token in the last allowed place is
reported as `stop` (SGLang: `length`); an in-place pause with `flush_cache` refuses an update before it changes anything
(SGLang swaps the weights, then answers 400); no key and value is ever used after the request that it was computed for,
so nothing old is met in place; `served_model_name` outlives an update (SGLang: the new path); weights of another shape
are refused (SGLang ends).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from miles_hpc.engine import rendering
from miles_hpc.engine.chat_tokenizer import ModelDirError
from miles_hpc.engine.parsing import parse_chat, parse_generate
from miles_hpc.engine.requests import (
    Backend,
    BadRequestError,
    PauseMode,
    Request,
    Result,
    Sampling,
    UpdateOutcome,
)
from miles_hpc.engine.streaming import stream_chat, stream_generate
from miles_hpc.engine.updates import group_member, group_name, tensor_specs
from miles_hpc.wire.serving import stop_event, until_one_ends
from miles_hpc.wire.time_limit import within

API_VERSION = "0.5.23"
"""The SGLang whose API this is."""
HEALTH_GENERATE_TIMEOUT_S = 20.0
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


def _is_not_a_stray(record: logging.LogRecord) -> bool:
    # A router that adds a worker first tries gRPC on its port; that is no error of anyone.
    return record.exc_info is None or not isinstance(record.exc_info[1], BadHttpMessage)


class PortTakenError(OSError):
    """The address is in use, or not one of this machine's."""


_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    if not raw:
        return {}
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"The body is not JSON: {error}") from error


async def _object(request: web.Request) -> dict[str, Any]:
    body = await _body(request)
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object.")
    return body


def _outcome(outcome: UpdateOutcome) -> web.Response:
    return _json({"success": outcome.success, "message": outcome.message}, 200 if outcome.success else 400)


@web.middleware
async def _bad_requests(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as error:
        if request.path.startswith("/v1/"):
            message = {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return _json(message, 400)
        return _json({"error": {"message": str(error)}}, 400)


class EngineApi:
    """The routes over one backend."""

    def __init__(self, backend: Backend, host: str, port: int, *, incremental: bool = False) -> None:
        self._backend = backend
        self._host = host
        self._port = port
        self._incremental = incremental
        self._live: set[str] = set()
        self._openapi: dict[str, dict[str, Any]] = {}

    def application(self) -> web.Application:
        """An aiohttp application; it closes the backend when it is cleaned up."""
        app = web.Application(middlewares=[_bad_requests], client_max_size=256 << 20)
        both = ("GET", "POST")
        routes: list[tuple[tuple[str, ...], str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
            (("GET",), "/health", self.health),
            (("GET",), "/ping", self.health),
            (("GET",), "/health_generate", self.health_generate),
            (("GET",), "/model_info", self.model_info),
            (("GET",), "/get_model_info", self.model_info),
            (("GET",), "/server_info", self.server_info),
            (("GET",), "/get_server_info", self.server_info),
            (("GET",), "/v1/models", self.models),
            (("GET",), "/v1/loads", self.loads),
            (("POST",), "/generate", self.generate),
            (("POST",), "/v1/chat/completions", self.chat),
            (("POST",), "/pause_generation", self.pause),
            (("POST",), "/continue_generation", self.resume),
            (("POST",), "/abort_request", self.abort),
            (both, "/flush_cache", self.flush_cache),
            (("POST",), "/update_weights_from_disk", self.update_weights_from_disk),
            (("POST",), "/update_weight_version", self.update_weight_version),
            (("POST",), "/init_weights_update_group", self.init_group),
            (("POST",), "/destroy_weights_update_group", self.destroy_group),
            (("POST",), "/begin_weight_update", self.begin_update),
            (("POST",), "/end_weight_update", self.end_update),
            (("POST",), "/update_weights_from_distributed", self.update_weights_from_distributed),
            (("POST",), "/weights_checker", self.weights_checker),
            (("GET",), "/ready", self.ready),
            (("GET",), "/metrics", self.metrics),
            (("GET",), "/openapi.json", self.openapi),
        ]
        for methods, path, handler in routes:
            for method in methods:
                app.router.add_route(method, path, handler)
        self._openapi = {path: {method.lower(): {} for method in methods} for methods, path, _ in routes}
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        await self._backend.close()

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine lives, whatever it is doing."""
        return web.Response(status=200 if self._backend.load().alive else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 when one token could be generated."""
        probe = Request(rid=f"HEALTH_CHECK_{id(request)}", input_ids=[0], sampling=Sampling(1, temperature=0.0))
        try:
            await within(HEALTH_GENERATE_TIMEOUT_S, self._backend.submit(probe))
        except asyncio.TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def model_info(self, request: web.Request) -> web.Response:
        """What is served, and the weight version."""
        return _json(rendering.model_info(self._backend))

    async def server_info(self, request: web.Request) -> web.Response:
        """How it is served."""
        # SGLang asks its scheduler for a part of it: it answers while paused, and hangs when that part is stopped.
        await self._backend.answers()
        return _json(rendering.server_info(self._backend, self._host, self._port, API_VERSION))

    async def ready(self, request: web.Request) -> web.Response:
        """200 when a request would be served now."""
        load = self._backend.load()
        return web.Response(status=200 if load.alive and not load.paused else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text, under SGLang's names."""
        return web.Response(text=rendering.metrics(self._backend), content_type="text/plain", charset="utf-8")

    async def openapi(self, request: web.Request) -> web.Response:
        """Which calls there are, as far as a client looks."""
        info = {"title": self._backend.kind, "version": API_VERSION}
        return _json({"openapi": "3.1.0", "info": info, "paths": self._openapi})

    async def models(self, request: web.Request) -> web.Response:
        """OpenAI's model list, with the one model."""
        name = self._backend.served_model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name, "parent": None}
        return _json({"object": "list", "data": [{**model, "max_model_len": self._backend.context_length}]})

    async def loads(self, request: web.Request) -> web.Response:
        """Running and waiting requests."""
        return _json({"version": API_VERSION, **rendering.loads(self._backend)})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Continue one prompt, a batch of them, or n samples of each."""
        body = await _body(request)
        requests, many = parse_generate(body, self._backend)
        if body.get("stream"):
            return await self._stream(
                requests,
                lambda one, result: stream_generate(request, one, result, self._backend, incremental=self._incremental),
            )
        results = await self._run(requests)
        answers = [
            rendering.generate_answer(one, result, self._backend) for one, result in zip(requests, results, strict=True)
        ]
        return _json(answers if many else answers[0])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        body = await _body(request)
        requests = parse_chat(body, self._backend)
        if body.get("stream"):
            return await self._stream(
                requests, lambda one, result: stream_chat(request, body, one, result, self._backend)
            )
        results = await self._run(requests)
        return _json(rendering.chat_answer(body, requests, results, self._backend))

    async def _stream(
        self,
        requests: list[Request],
        tell: Callable[[Request, asyncio.Future[Result]], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if len(requests) != 1:
            raise BadRequestError("stream is for one sequence: send each prompt and sample as a request of its own.")
        result = asyncio.ensure_future(self._run_one(requests[0]))
        try:
            # What is refused at once is an error status, not a stream that begins with 200.
            await asyncio.sleep(0)
            if result.done():
                result.result()
            return await tell(requests[0], result)
        finally:
            result.cancel()

    async def _run(self, requests: list[Request]) -> list[Result]:
        if len(requests) == 1:
            return [await self._run_one(requests[0])]
        rids = self._claim(requests)
        # The client's leaving cancels this handler, and with it every submit, which aborts its request.
        tasks = [asyncio.ensure_future(self._backend.submit(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            self._live -= rids

    async def _run_one(self, request: Request) -> Result:
        rids = self._claim([request])
        try:
            return await self._backend.submit(request)
        finally:
            self._live -= rids

    def _claim(self, requests: list[Request]) -> set[str]:
        rids = {request.rid for request in requests}
        if len(rids) < len(requests) or rids & self._live:
            raise BadRequestError(f"Duplicate request ID: {', '.join(sorted(rids & self._live) or sorted(rids))}.")
        self._live |= rids
        return rids

    async def pause(self, request: web.Request) -> web.Response:
        """Stop generating: running requests are aborted (default), retracted, or kept in place."""
        mode = (await _object(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}.")
        await self._backend.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Generate again."""
        await self._backend.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        """End one request or all; each answers 200 with its partial output."""
        body = await _object(request)
        if body.get("abort_all"):
            await self._backend.abort(None)
        elif body.get("rid"):
            await self._backend.abort(str(body["rid"]))
        return web.Response(status=200)

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Forget cached keys and values; 400 while requests are live."""
        if await self._backend.flush_cache():
            return web.Response(text=FLUSHED)
        return web.Response(text="Flush cache failed.\n", status=400)

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """Load another model directory of the same shape; 400 and the old weights when that fails."""
        body = await _object(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequestError("model_path must name a model directory.")
        outcome = await self._backend.update_weights_from_disk(
            path,
            None if version is None else str(version),
            flush_cache=body.get("flush_cache") is not False,
            abort_all=bool(body.get("abort_all_requests")),
        )
        answer = {"success": outcome.success, "message": outcome.message, "num_paused_requests": 0}
        return _json(answer, 200 if outcome.success else 400)

    async def weights_checker(self, request: web.Request) -> web.Response:
        """Checksums of all tensors."""
        if (await _object(request)).get("action") != "checksum":
            raise BadRequestError("action must be checksum.")
        ranks = [{"checksums": await self._backend.checksums()}]
        return _json({"success": True, "message": "Success.", "ranks": ranks})

    async def init_group(self, request: web.Request) -> web.Response:
        """Join a weight update group; 200 when all members are there."""
        return _outcome(await self._backend.init_group(group_member(await _object(request))))

    async def destroy_group(self, request: web.Request) -> web.Response:
        """Leave a weight update group."""
        return _outcome(await self._backend.destroy_group(group_name(await _object(request))))

    async def begin_update(self, request: web.Request) -> web.Response:
        """Open a session of updates."""
        return _outcome(await self._backend.begin_update())

    async def end_update(self, request: web.Request) -> web.Response:
        """Close it."""
        return _outcome(await self._backend.end_update())

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        """Receive tensors that rank 0 of a group broadcasts at the same time."""
        body = await _object(request)
        version = body.get("weight_version")
        outcome = await self._backend.update_weights_from_group(
            group_name(body),
            tensor_specs(body),
            None if version is None else str(version),
            flush_cache=body.get("flush_cache") is not False,
            abort_all=bool(body.get("abort_all_requests")),
        )
        return _outcome(outcome)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Change the label; running requests are aborted unless `abort_all_requests` is false, as in SGLang."""
        body = await _object(request)
        if body.get("new_version") is None:
            raise BadRequestError("new_version is missing.")
        version = str(body["new_version"])
        await self._backend.set_weight_version(version, abort_all=body.get("abort_all_requests") is not False)
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that both engines take."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--model-path", required=True, help="HF model directory")
    parser.add_argument("--chat-template", default="", help="file that replaces the model's chat template")
    parser.add_argument("--weight-version", default="default", help="label of the first weights")
    parser.add_argument("--max-running-requests", type=int, default=64, help="requests generated at once")
    parser.add_argument("--context-length", type=int, default=0, help="longest sequence; 0: the model's")
    parser.add_argument(
        "--incremental-streaming-output", action="store_true", help="events of /generate hold what is new only"
    )


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What both backends take alike of `add_arguments`, by keyword."""
    return {
        "chat_template": args.chat_template,
        "weight_version": args.weight_version,
        "context_length": args.context_length,
        "max_running_requests": args.max_running_requests,
    }


def run_program(parser: argparse.ArgumentParser, program: Coroutine[Any, Any, None]) -> int:
    """Run a server to its end; a model directory or port that cannot be used is one line on stderr, status 2 or 1."""
    try:
        asyncio.run(program)
    except ModelDirError as error:
        parser.exit(2, f"error: {error}\n")
    except PortTakenError as error:
        parser.exit(1, f"error: {error}\n")
    return 0


async def serve(backend: Backend, args: argparse.Namespace) -> None:
    """Serve until a stop signal, then abort what runs and return.

    Args:
        args: what `add_arguments` brought.

    Raises:
        PortTakenError: when the port cannot be listened on.
        Exception: whatever the engine failed with.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_not_a_stray)
    stopped, host, port = stop_event(), args.host, args.port
    runner = web.AppRunner(
        EngineApi(backend, host, port, incremental=args.incremental_streaming_output).application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=3600.0,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as error:
            raise PortTakenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        _log.info("%s engine serves %s on %s:%d", backend.kind, backend.model_path, host, port)
        await until_one_ends(stopped.wait(), backend.failed())
    finally:
        # Aborted requests answer with what they have, so nothing is left for the connections' time-out.
        await backend.close()
        await runner.cleanup()
