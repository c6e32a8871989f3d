"""Generation through the router: token ids in, token ids out, retried until a deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from miles_hpc.inference.answers import Generation, SamplingParams, Span, parse_answer
from miles_hpc.inference.engine_api import UNPUBLISHED
from miles_hpc.inference.http_session import Withdrawn, brief
from miles_hpc.inference.merging import AnswerInvalid
from miles_hpc.inference.router_api import RouterApi, RouterError
from miles_hpc.inference.streams import IDLE_S, EngineBook, SilenceWatch, Silent, StreamCut, Waiting, read_answer

__all__ = [
    "EngineFailed",
    "GenerateClient",
    "GenerateError",
    "GenerateRejected",
    "GenerateUnavailable",
    "Generation",
    "NoHealthyWorker",
    "NoRouter",
    "NoWorker",
    "RequestAborted",
    "RequestLost",
    "RouterRefused",
    "SamplingParams",
    "Span",
    "UnpublishedWeights",
]

log = logging.getLogger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_PROGRESS_S = 10.0
_REJECTED = frozenset({400, 401, 403, 413, 422})
_JSON = {"Content-Type": "application/json"}
_encoder = msgspec.json.Encoder()


class GenerateError(RuntimeError):
    """No generation came of a request."""


class GenerateRejected(GenerateError):
    """The request itself is wrong; sending it again cannot help."""


class GenerateUnavailable(GenerateError):
    """Nothing answered until the deadline; the subclass names what the last attempt met."""


class NoRouter(GenerateUnavailable):
    """No router is in the address book."""


class RouterRefused(GenerateUnavailable):
    """Nothing listens at the router's address."""


class RequestLost(GenerateUnavailable):
    """The connection to the router ended, or the router moved, before the answer was complete."""


class _CutOff(RequestLost):
    """The deadline came in the middle of an attempt, which says nothing about why there had been earlier ones."""


class NoWorker(GenerateUnavailable):
    """The router has no engine in its list."""


class NoHealthyWorker(GenerateUnavailable):
    """The router lists engines, but holds all for unhealthy or their circuits open."""


class EngineFailed(GenerateUnavailable):
    """An engine, or the router for it, answered with a server error."""


class RequestAborted(GenerateUnavailable):
    """The engine ended the request with finish reason `abort`."""


class UnpublishedWeights(GenerateUnavailable):
    """The answer came from an engine that took no published weights yet."""


class GenerateClient:
    """Generation through whatever router `router_url()` names at the time.

    Args:
        router_url: `http://host:port` of the router, None while there is none; asked anew for each attempt.
        http: the caller's client, see `open_http`; it is not closed here.
        vocab_size: ids outside `0..vocab_size-1` are refused here, since one of them kills an engine (seen).
        published_only: an answer of an engine without a published weight version is drawn again.
        engines: the living engines; with them a request that a lost one held is drawn again at once, see `streams`.
        idle_s: silence after which a request is given up, unless an engine has a reason for it.
    """

    def __init__(
        self,
        router_url: Callable[[], str | None],
        http: aiohttp.ClientSession,
        vocab_size: int,
        *,
        published_only: bool = False,
        engines: Callable[[], EngineBook] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._router_url = router_url
        self._http = http
        self._vocab_size = vocab_size
        self._published_only = published_only
        self._watch = SilenceWatch(router_url, engines, http, idle_s=idle_s)
        self._last_progress = 0.0
        self.retries = 0
        """Attempts so far that had to be made again."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        rid: str | None = None,
        deadline_s: float,
        routing_key: str | None = None,
        take_aborted: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Generate after `input_ids`. An aborted or lost request is drawn again from its start, with the same seed.

        Args:
            rid: request id; further attempts add their number to it, since an engine refuses one that it still runs,
                and an abort of `rid` ends these too.
            deadline_s: seconds from now, retries included.
            routing_key: sent as X-SMG-Routing-Key, which a router of policy `manual` keeps on one engine.
            take_aborted: whether an aborted answer is wanted as it is, because the caller had it aborted.

        Raises:
            GenerateRejected: at once, when the request is wrong.
            GenerateUnavailable: one of its subclasses, when the deadline passed.
        """
        self._check(input_ids, sampling)
        payload: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": sampling.payload(),
            "return_logprob": True,
            "stream": True,
        }
        headers = _JSON if routing_key is None else {**_JSON, ROUTING_KEY: routing_key}
        started = time.monotonic()
        deadline = started + deadline_s
        backoff, attempts = _FIRST_BACKOFF_S, 0
        met: GenerateUnavailable | None = None
        while True:
            attempts += 1
            if rid is not None:
                payload["rid"] = rid if attempts == 1 else f"{rid}_{attempts}"
            try:
                return await self._attempt(payload, headers, deadline, take_aborted)
            except GenerateUnavailable as failure:
                now = time.monotonic()
                met = failure if met is None or not isinstance(failure, _CutOff) else met
                if now + backoff >= deadline:
                    text = f"{met} (last of {attempts} attempts in {now - started:.1f} s)"
                    raise (RequestLost if isinstance(met, _CutOff) else type(met))(text) from failure
                self._report(failure, attempts, now - started, now)
            self.retries += 1
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    def _check(self, input_ids: Sequence[int], sampling: SamplingParams) -> None:
        if not input_ids:
            raise GenerateRejected("input_ids is empty: a prompt needs at least one token")
        if not 0 <= min(input_ids) <= max(input_ids) < self._vocab_size:
            position = next(i for i, token in enumerate(input_ids) if not 0 <= token < self._vocab_size)
            raise GenerateRejected(
                f"input_ids[{position}] = {input_ids[position]} is outside 0..{self._vocab_size - 1}: "
                f"prompt and model do not use one tokenizer"
            )
        if sampling.max_new_tokens < 1:
            raise GenerateRejected(f"max_new_tokens is {sampling.max_new_tokens}, expected at least 1")

    async def _attempt(
        self, payload: dict[str, Any], headers: dict[str, str], deadline: float, take_aborted: Callable[[], bool]
    ) -> Generation:
        url = self._router_url()
        if url is None:
            raise NoRouter("no router is in the address book")
        try:
            waiting = self._watch.over(url, deadline)
            status, events = await waiting.run(self._post(url, payload, headers, waiting))
        except Withdrawn as error:
            raise RequestLost(f"router {url} was withdrawn with the request in flight") from error
        except Silent as error:
            raise RequestLost(f"router {url}: {error}") from error
        except asyncio.TimeoutError as error:
            raise _CutOff(f"router {url} did not answer before the deadline") from error
        if status != 200:
            raise await self._failure(url, status, b"".join(events))
        try:
            generation = parse_answer(events, self._vocab_size)
        except AnswerInvalid as error:
            raise EngineFailed(f"router {url}: {error}") from error
        if generation.finish_reason == "abort" and not take_aborted():
            raise RequestAborted(f"an engine behind {url} aborted the request")
        if self._published_only and any(version == UNPUBLISHED for version, _, _ in generation.weight_versions):
            raise UnpublishedWeights(f"an engine behind {url} served weights that nobody published")
        return generation

    async def _post(
        self, url: str, payload: dict[str, Any], headers: dict[str, str], waiting: Waiting
    ) -> tuple[int, list[bytes]]:
        body = _encoder.encode(payload)
        try:
            async with self._http.post(f"{url}/generate", data=body, headers=headers) as response:
                return await read_answer(response, waiting)
        except StreamCut as error:
            raise RequestLost(f"router {url}: {error}") from error
        except aiohttp.ClientConnectorError as error:
            raise RouterRefused(f"router {url} refused the connection: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestLost(f"router {url}: {type(error).__name__}: {error}") from error

    async def _failure(self, url: str, status: int, body: bytes) -> GenerateError:
        text = body.decode(errors="replace")
        if status in _REJECTED:
            return GenerateRejected(f"router {url}: {status}: {brief(text)}")
        if status == 503 and "no_available_workers" in text:
            # One text for three cases; the router's list tells the first from the others.
            try:
                listed = await RouterApi(url, self._http, timeout_s=2.0).workers()
            except RouterError as error:
                return RequestLost(str(error))
            if not listed:
                return NoWorker(f"router {url} lists no engine")
            healthy = sum(worker.healthy for worker in listed)
            return NoHealthyWorker(f"router {url} has no engine for requests: {healthy} of {len(listed)} are healthy")
        return EngineFailed(f"router {url}: {status}: {brief(text)}")

    def _report(self, failure: GenerateUnavailable, attempts: int, waited_s: float, now: float) -> None:
        # One line per client and interval: hundreds of requests meet the same failure at once.
        if waited_s >= _PROGRESS_S and now - self._last_progress >= _PROGRESS_S:
            self._last_progress = now
            kind = type(failure).__name__
            log.warning("generate: no answer for %.0f s, attempt %d: %s: %s", waited_s, attempts, kind, failure)
