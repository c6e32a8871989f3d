"""The session server: OpenAI chat per session over token-exact generation."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.inference.generate import GenerateClient, GenerateRejected, GenerateUnavailable
from miles_hpc.session.continuation import Continuation
from miles_hpc.session.errors import (
    InvalidRequest,
    SessionError,
    SessionLost,
    TurnInFlight,
    Unauthorized,
    UpstreamUnavailable,
)
from miles_hpc.session.requests import ChatDefaults, as_stream, chat_answer, read_request
from miles_hpc.session.state import MSGPACK, ChatRequest, Session

log = logging.getLogger(__name__)

_MAX_BODY = 64 << 20


class SessionServer:
    """All sessions of one instance.

    Nothing is locked while a turn is generated: a session changes only between two awaits, so DELETE, samples and other
    sessions never wait for an engine.

    Args:
        instance: this process's name and generation, so that a client can tell a restarted one.
        idle_s: a session that nobody used for this long is forgotten.
        key: what callers must send as bearer; empty: none. An instance has the engines' key and would lend it to all.
    """

    def __init__(
        self,
        instance: str,
        tokenizer: ChatTokenizer,
        generate: GenerateClient,
        defaults: ChatDefaults,
        *,
        idle_s: float,
        key: str = "",
    ) -> None:
        self.instance = instance
        self.sessions: dict[str, Session] = {}
        self._tokenizer = tokenizer
        self._continuation = Continuation(tokenizer)
        self._generate = generate
        self._defaults = defaults
        self._idle_s = idle_s
        self._key = key

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_typed_errors, _keyed(self._key)], client_max_size=_MAX_BODY)
        app.add_routes(
            [
                web.get("/health", self._on_health),
                web.post("/sessions", self._on_create),
                web.get("/sessions/{id}", self._on_get),
                web.delete("/sessions/{id}", self._on_delete),
                web.post("/sessions/{id}/v1/chat/completions", self._on_chat),
                web.post("/sessions/{id}/samples", self._on_samples),
            ]
        )
        return app

    async def expire(self) -> None:
        """Forget idle sessions until cancelled."""
        while True:
            await asyncio.sleep(min(30.0, self._idle_s / 4))
            self.forget_idle(time.monotonic())

    def forget_idle(self, now: float) -> list[str]:
        """Forget sessions that were last used `idle_s` before `now` and generate nothing; returns their ids."""
        idle = [s.id for s in self.sessions.values() if s.running is None and now - s.last_used >= self._idle_s]
        for session_id in idle:
            self._close(self.sessions[session_id])
        if idle:
            log.warning("%d sessions were not used for %g s and are forgotten", len(idle), self._idle_s)
        return idle

    def _session(self, request: web.Request) -> Session:
        session_id = request.match_info["id"]
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionLost(
                f"session {session_id} is not known to {self.instance}: it was deleted, expired, or the instance was "
                f"restarted; begin another session"
            )
        session.last_used = time.monotonic()
        return session

    def _close(self, session: Session) -> None:
        session.closed = True
        del self.sessions[session.id]
        if session.running is not None:
            session.running[1].cancel()

    # ------------------------------------------------------------------------------------------------- handlers
    async def _on_health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "instance": self.instance, "sessions": len(self.sessions)})

    async def _on_create(self, request: web.Request) -> web.Response:
        session = Session(id=uuid.uuid4().hex, last_used=time.monotonic())
        self.sessions[session.id] = session
        return _json({"session_id": session.id, "instance": self.instance})

    async def _on_get(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return _json(
            {
                "session_id": session.id,
                "instance": self.instance,
                "messages": session.messages,
                "turns": session.turns,
                "tokens": len(session.token_ids),
                "generating": session.running is not None,
            }
        )

    async def _on_delete(self, request: web.Request) -> web.Response:
        self._close(self._session(request))
        return web.Response(status=204)

    async def _on_samples(self, request: web.Request) -> web.Response:
        sample = self._session(request).sample(self._tokenizer)
        if MSGPACK in request.headers.get("Accept", ""):
            return web.Response(body=msgspec.msgpack.encode(sample), content_type=MSGPACK)
        return _json(sample)

    async def _on_chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        read = read_request(await request.read(), self._defaults)
        answer = await self._chat(session, read.chat, read.timeout_s)
        if read.stream:
            return web.Response(body=as_stream(answer), content_type="text/event-stream")
        return _json(answer)

    async def _chat(self, session: Session, chat: ChatRequest, timeout_s: float) -> dict[str, Any]:
        key = chat.key()
        if session.closed:  # while the body was read
            raise SessionLost(f"session {session.id} was deleted")
        if session.last_answer is not None and key == session.last_key:
            return session.last_answer  # the answer got lost on its way: the turn is not drawn twice
        if session.running is None:
            prompt = session.next_prompt(chat, self._continuation)
            turn = asyncio.ensure_future(self._turn(session, chat, prompt, timeout_s))
            turn.add_done_callback(_look_at)
            session.running = (key, turn)
        elif session.running[0] != key:
            raise TurnInFlight(f"session {session.id} generates another turn; send one at a time")
        turn = session.running[1]
        try:
            # A client that gives up and asks again finds the turn still running, or done.
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            if session.closed and turn.cancelled():
                raise SessionLost(f"session {session.id} was deleted while a turn was generated") from None
            raise

    async def _turn(self, session: Session, chat: ChatRequest, prompt: list[int], timeout_s: float) -> dict[str, Any]:
        try:
            generation = await self._generate.generate(
                prompt, chat.sampling, deadline_s=timeout_s, routing_key=session.id
            )
            session.record(chat, prompt, generation)
            session.last_answer = chat_answer(session.id, len(prompt), generation)
            return session.last_answer
        except GenerateRejected as error:
            raise InvalidRequest(str(error)) from error
        except GenerateUnavailable as error:
            raise UpstreamUnavailable(f"{type(error).__name__}: {error}") from error
        finally:
            session.running = None
            session.last_used = time.monotonic()


def _look_at(turn: asyncio.Task[dict[str, Any]]) -> None:
    # A turn whose client gave up has nobody else to look at its error, which asyncio would complain about.
    if not turn.cancelled():
        turn.exception()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(kind: str, status: int, message: str) -> web.Response:
    return _json({"error": {"type": kind, "code": status, "message": message}}, status)


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _keyed(key: str) -> Any:
    """A middleware that refuses who does not send the key; the agent's probe of `/health` needs none."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if key and request.path != "/health" and not hmac.compare_digest(given, expected):
            raise Unauthorized("this session server answers only to the run's key")
        return await handler(request)

    return check


@web.middleware
async def _typed_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SessionError as error:
        return _error(error.kind, error.status, str(error))
    except web.HTTPException as error:
        return _error("invalid_request", error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _error("internal", 500, f"{type(error).__name__}: {error}")
