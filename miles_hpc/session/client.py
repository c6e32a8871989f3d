"""Sessions for generate functions: every call is bounded, and a lost instance costs one exchange, not the run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from miles_hpc.inference.answers import SamplingParams, Span
from miles_hpc.inference.http_session import Withdrawn, brief, while_listed
from miles_hpc.session.errors import KINDS, SessionError, SessionLost, UpstreamUnavailable
from miles_hpc.session.state import MSGPACK, SessionSample
from miles_hpc.wire.ids import Generation as CellGeneration
from miles_hpc.wire.messages import CellAddrs

_CALL_S = 30.0
_MARGIN_S = 5.0
_POLL_S = 0.1


class NoSessionServer(SessionError):
    """No instance is ready within the deadline."""

    kind = "no_session_server"


class SessionHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A session, on the instance that it was created on; it lives nowhere else."""

    id: str
    url: str
    cell: str
    generation: CellGeneration

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base url, without the trailing `/v1`; its key is `Services.api_key`."""
        return f"{self.url}/sessions/{self.id}"


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One generated answer. `weight_versions` are spans over its own tokens."""

    message: dict[str, Any]
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[Span]

    @property
    def text(self) -> str:
        """The answer's text."""
        return str(self.message["content"])


class SessionClient:
    """Calls to the session servers that `instances()` lists.

    Args:
        instances: the living cells of the session-server pool, asked anew for each call.
        http: the caller's client, see `open_http`; it is not closed here.
    """

    def __init__(self, instances: Callable[[], Sequence[CellAddrs]], http: aiohttp.ClientSession) -> None:
        self._instances = instances
        self._http = http
        self._turn = itertools.count()

    async def create(self, *, deadline_s: float = 60.0) -> SessionHandle:
        """Begin a session on one of the ready instances, in turn; another one is tried when it does not answer.

        Raises:
            NoSessionServer: when none did within `deadline_s`.
        """
        deadline = time.monotonic() + deadline_s
        last = "none is ready"
        while True:
            ready = [cell for cell in self._instances() if cell.ready and cell.workers]
            if ready:
                cell = ready[next(self._turn) % len(ready)]
                url = cell.workers[0]["http"].addr
                blank = SessionHandle(id="", url=url, cell=cell.cell, generation=cell.generation)
                try:
                    left = max(0.1, deadline - time.monotonic())
                    body = await self._call(blank, "POST", "/sessions", timeout_s=min(_CALL_S, left))
                except SessionError as error:
                    last = str(error)
                else:
                    return msgspec.structs.replace(blank, id=msgspec.json.decode(body)["session_id"])
            if time.monotonic() + _POLL_S >= deadline:
                raise NoSessionServer(f"no session server within {deadline_s:g} s: {last}")
            await asyncio.sleep(_POLL_S)

    async def chat(
        self,
        session: SessionHandle,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        deadline_s: float,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatTurn:
        """Generate the next answer. `messages` is the whole conversation, earlier answers included.

        Raises:
            SessionLost: the instance or the session is gone: redo the exchange in another session.
            UpstreamUnavailable: no engine answered within `deadline_s`.
            InvalidRequest: HistoryDiverged and others that a repetition cannot help.
        """
        body: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "timeout_s": deadline_s,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if sampling.stop_token_ids:
            body["stop_token_ids"] = sampling.stop_token_ids
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if tools:
            body["tools"] = list(tools)
        path = f"/sessions/{session.id}/v1/chat/completions"
        choice = msgspec.json.decode(
            await self._call(session, "POST", path, body=body, timeout_s=deadline_s + _MARGIN_S)
        )["choices"][0]
        return ChatTurn(
            message=choice["message"],
            finish_reason=choice["finish_reason"],
            token_ids=choice["response_token_ids"],
            logprobs=choice["response_logprobs"],
            weight_versions=[(version, start, end) for version, start, end in choice["weight_versions"]],
        )

    async def samples(self, session: SessionHandle, *, timeout_s: float = _CALL_S) -> SessionSample:
        """The session as training data. Raises SessionLost, NoTurns."""
        body = await self._call(session, "POST", f"/sessions/{session.id}/samples", timeout_s=timeout_s)
        return msgspec.msgpack.decode(body, type=SessionSample)

    async def delete(self, session: SessionHandle, *, timeout_s: float = 10.0) -> bool:
        """Forget the session; False when its instance did not confirm, which costs only memory until it expires."""
        try:
            await self._call(session, "DELETE", f"/sessions/{session.id}", timeout_s=timeout_s)
        except SessionError:
            return False
        return True

    def _is_listed(self, session: SessionHandle) -> bool:
        return any(c.cell == session.cell and c.generation == session.generation for c in self._instances())

    async def _call(
        self,
        session: SessionHandle,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: dict[str, Any] | None = None,
    ) -> bytes:
        where = f"{method} {session.url}{path}"
        if not self._is_listed(session):
            raise SessionLost(f"{where}: {session.cell} g{session.generation} is not in the address book any more")
        try:
            call = self._request(method, session.url + path, body)
            status, answer = await while_listed(call, lambda: self._is_listed(session), timeout_s)
        except Withdrawn as error:
            raise SessionLost(f"{where}: {session.cell} left the address book with the call in flight") from error
        except asyncio.TimeoutError as error:
            raise UpstreamUnavailable(f"{where}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SessionLost(f"{where}: {type(error).__name__}: {error}") from error
        if status < 300:
            return answer
        raise _error(where, status, answer)

    async def _request(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        async with self._http.request(method, url, json=body, headers={"Accept": MSGPACK}) as response:
            return response.status, await response.read()


def _error(where: str, status: int, answer: bytes) -> SessionError:
    try:
        described = msgspec.json.decode(answer)["error"]
        kind, text = str(described["type"]), str(described["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        kind, text = "", brief(answer.decode(errors="replace"))
    return KINDS.get(kind, SessionError)(f"{where}: {status}: {text}")
