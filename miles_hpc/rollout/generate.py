"""Generate functions: a sample with a prompt in, the same sample with tokens and a response out.

The user's own is `async def f(sample: Sample, context: GenerateContext)`, named by `rollout.generate`. It fills the
sample as `Sample` says and returns None; or it returns a sample or a list of samples that are all one generation, e.g.
the parts of a conversation that was compacted. What it raises fails the sample.

A sample may come with tokens of an earlier, interrupted generation; a function that does not go on from them begins
anew by overwriting them. `context.interrupted` says that the group is no longer needed now: a function that ends early
then leaves what it has in the sample, with status `aborted`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from miles_hpc.config.schema import Config
from miles_hpc.rollout.functions import load_function
from miles_hpc.rollout.sample import Sample, Status, sample_seed
from miles_hpc.rollout.statistics import add_up
from miles_hpc.rollout.work_messages import EvalSampling
from miles_hpc.specs.router import router_pool
from miles_hpc.specs.session import SESSION_POOL

if TYPE_CHECKING:
    import aiohttp

    from miles_hpc.engine.chat_tokenizer import ChatTokenizer
    from miles_hpc.inference.generate import GenerateClient, Generation, SamplingParams
    from miles_hpc.inference.http_session import HttpKeys
    from miles_hpc.session.client import SessionClient
    from miles_hpc.wire.messages import CellAddrs

log = logging.getLogger(__name__)

KEY = "rollout.generate"
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_DELETE_S = 5.0
_ABORT_S = 5.0
_RENDERED = 64
"""Prompts whose token ids are kept."""


class PromptTooLong(ValueError):
    """The prompt has more than `data.max_prompt_tokens` tokens; it is left out and counted."""


class SampleTimeout(Exception):
    """A sample was not finished in `rollout.sample_timeout_s`; the text says what kept it."""


class Services:
    """What generate functions use, shared by all samples of a worker and made when first used.

    Args:
        pools: the address book as it is now.
        run_dir: holds the run's keys; None: engines ask for none.
    """

    def __init__(
        self,
        config: Config,
        pools: Callable[[], dict[str, list[CellAddrs]]],
        run_dir: Path | None = None,
        attempt: int = 0,
    ) -> None:
        self.config = config
        self._pools = pools
        self._run_dir, self._attempt = run_dir, attempt
        self._models: dict[str, GenerateClient] = {}
        self._rendered: dict[bytes, list[int]] = {}

    @functools.cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The policy's tokenizer and chat template."""
        from miles_hpc.engine.chat_tokenizer import ChatTokenizer

        return ChatTokenizer(self.config.model.path, self.config.model.chat_template)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of a prompt; those of the last few are kept, for the other samples of their groups."""
        key = msgspec.msgpack.encode((sample.prompt, sample.tools), enc_hook=repr)
        ids = self._rendered.pop(key, None)
        if ids is None:
            tools = {"tools": sample.tools} if sample.tools else {}
            ids = self.tokenizer.render(sample.messages(), add_generation_prompt=True, **tools)
        self._rendered[key] = ids  # the newest last
        if len(self._rendered) > _RENDERED:
            del self._rendered[next(iter(self._rendered))]
        return list(ids)

    @functools.cached_property
    def http(self) -> aiohttp.ClientSession:
        """The worker's HTTP client; it sends the run's key."""
        from miles_hpc.inference.http_session import open_http

        return open_http(self._keys)

    @property
    def api_key(self) -> str:
        """The run's key, for clients that do not use `http`: what an OpenAI client of a session takes as `api_key`.

        Such clients want a word even where none is asked for.
        """
        return self._keys.run or "none"

    @functools.cached_property
    def _keys(self) -> HttpKeys:
        from miles_hpc.inference.http_session import HttpKeys, http_keys

        return HttpKeys() if self._run_dir is None else http_keys(self.config, self._run_dir, self._attempt)

    @functools.cached_property
    def engine(self) -> GenerateClient:
        """Generation through the router."""
        from miles_hpc.inference.book import engine_urls_in
        from miles_hpc.inference.generate import GenerateClient

        return GenerateClient(
            self._router_url,
            self.http,
            self.tokenizer.vocab_size,
            published_only=True,
            engines=lambda: engine_urls_in(self._pools(), self.config.model.name, self.config.inference.external),
        )

    def model(self, name: str) -> GenerateClient:
        """Generation by a model of `[models]`, in its own token ids.

        Raises:
            ValueError: when the run has no such model.
        """
        from miles_hpc.engine.chat_tokenizer import ChatTokenizer
        from miles_hpc.inference.book import engine_urls_in, router_url_in
        from miles_hpc.inference.generate import GenerateClient

        known = self.config.models.get(name)
        if known is None:
            raise ValueError(f"no model {name!r}: [models] has {', '.join(self.config.models) or 'none'}")
        if name not in self._models:
            self._models[name] = GenerateClient(
                lambda: router_url_in(self._pools(), name),
                self.http,
                ChatTokenizer(known.path, known.chat_template, require_template=False).vocab_size,
                published_only=known.update_weights,
                engines=lambda: engine_urls_in(self._pools(), name, known.external),
            )
        return self._models[name]

    @functools.cached_property
    def sessions(self) -> SessionClient:
        """Chat through the session servers."""
        from miles_hpc.session.client import SessionClient

        return SessionClient(lambda: self._pools().get(SESSION_POOL, []), self.http)

    def _router_url(self) -> str | None:
        cells = [cell for cell in self._pools().get(router_pool(self.config), []) if cell.ready]
        return cells[0].workers[0]["http"].addr if cells else None

    async def abort(self, rids: Sequence[str]) -> None:
        """End requests at the engines; what does not answer is left alone, its request then ends by itself."""
        from miles_hpc.inference.book import engine_urls_in

        urls = engine_urls_in(self._pools(), self.config.model.name, self.config.inference.external).values()

        async def one(url: str, rid: str) -> None:
            import aiohttp

            limit = aiohttp.ClientTimeout(total=_ABORT_S)
            try:
                async with self.http.post(f"{url}/abort_request", json={"rid": rid}, timeout=limit) as answer:
                    await answer.read()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                log.warning("%s did not take an abort: %s", url, error or type(error).__name__)

        # The router does not say which engine runs a request.
        await asyncio.gather(*(one(url, rid) for url in urls for rid in rids))

    async def close(self) -> None:
        """Close what was made."""
        if "http" in self.__dict__:
            await self.http.close()


class GenerateContext:
    """One sample's view of the services.

    Args:
        stage: told what the sample is doing, for reports on slow samples.
        overrides: sampling of an evaluated data set.
    """

    def __init__(
        self,
        services: Services,
        timeout_s: float,
        stage: Callable[[str], None] = lambda name: None,
        overrides: EvalSampling | None = None,
    ) -> None:
        self._overrides = overrides
        self._rids: set[str] = set()
        self._interruption = asyncio.Event()
        self.interrupted = False
        """The group is not needed now: end with what there is."""
        self.config = services.config
        self.services = services
        self.stage = stage
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the sample's deadline."""
        return self._deadline - time.monotonic()

    @property
    def request_s(self) -> float:
        """Seconds that one generate request may take."""
        return max(0.0, min(self.left_s, self.config.inference.request_timeout_s))

    def sampling(self, sample: Sample, turn: int = 0) -> SamplingParams:
        """Sampling parameters as configured: greedy in evaluation, and a seed of its own for each turn."""
        from miles_hpc.inference.generate import SamplingParams

        rollout, eval_ = self.config.rollout, self._overrides or EvalSampling()
        return SamplingParams(
            max_new_tokens=eval_.max_response_tokens or rollout.max_response_tokens,
            temperature=eval_.temperature if sample.evaluation else rollout.temperature,
            top_p=eval_.top_p if sample.evaluation else rollout.top_p,
            top_k=-1 if sample.evaluation else rollout.top_k,
            stop=list(rollout.stop),
            stop_token_ids=self.services.tokenizer.stop_token_ids,
            seed=sample.seed if turn == 0 else sample_seed(sample.seed, sample.epoch, sample.prompt_index, turn),
        )

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of the prompt, ready for an answer.

        Raises:
            PromptTooLong: they are more than `data.max_prompt_tokens`.
        """
        ids = self.services.prompt_ids(sample)
        limit = self.config.data.max_prompt_tokens
        if len(ids) > limit:
            raise PromptTooLong(f"prompt {sample.prompt_index} has {len(ids)} tokens, data.max_prompt_tokens = {limit}")
        return ids

    def interrupt(self) -> list[str]:
        """Say that the group is not needed now. Returns the requests that are to be aborted at the engines."""
        self.interrupted = True
        self._interruption.set()
        return sorted(self._rids)

    async def until_interrupted(self) -> None:
        """Returns once the group is not needed now."""
        await self._interruption.wait()

    async def generate(self, input_ids: list[int], sampling: SamplingParams) -> Generation:
        """One generation. After an interruption it has finish reason `abort` and the tokens drawn until then."""
        engine = self.services.engine
        if not self.config.rollout.partial:
            return await engine.generate(input_ids, sampling, deadline_s=self.request_s)
        rid = uuid.uuid4().hex
        self._rids.add(rid)
        try:
            return await engine.generate(
                input_ids, sampling, deadline_s=self.request_s, rid=rid, take_aborted=lambda: self.interrupted
            )
        finally:
            self._rids.discard(rid)


GenerateFunction = Callable[[Sample, GenerateContext], Awaitable[Any]]


async def single_turn(sample: Sample, context: GenerateContext) -> None:
    """One answer of the policy to the prompt; goes on where an interrupted one was left."""
    prompt = context.prompt_ids(sample)
    if len(sample.token_ids) <= len(prompt):
        begin(sample, prompt)
    context.stage("generate")
    await draw_answer(sample, context, len(prompt))
    sample.response = context.services.tokenizer.decode(sample.token_ids[len(prompt) :])


STATUS_OF: Mapping[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def begin(sample: Sample, prompt: Sequence[int]) -> None:
    """Have the sample hold its prompt and nothing else."""
    sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions = [], [], [], []
    append_tokens(sample, prompt)


async def draw_answer(sample: Sample, context: GenerateContext, start: int, turn: int = 0) -> None:
    """Generate the answer of which token `start` is the first, or what an interruption left out of it."""
    sampling = context.sampling(sample, turn)
    begun = len(sample.token_ids) - start
    if begun >= sampling.max_new_tokens:
        sample.status = "truncated"
        return
    if begun:
        sampling = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - begun)
    answer = await context.generate(sample.token_ids, sampling)
    append_answer(sample, answer)
    sample.status = STATUS_OF[answer.finish_reason]


def append_tokens(sample: Sample, ids: Sequence[int]) -> None:
    """Tokens that the policy did not generate."""
    sample.token_ids.extend(ids)
    sample.loss_mask.extend([0] * len(ids))
    sample.logprobs.extend([0.0] * len(ids))


def append_answer(sample: Sample, answer: Generation) -> None:
    """Tokens that the policy generated."""
    base = len(sample.token_ids)
    sample.token_ids.extend(answer.token_ids)
    sample.loss_mask.extend([1] * len(answer.token_ids))
    sample.logprobs.extend(answer.logprobs)
    sample.versions.extend((version, base + start, base + end) for version, start, end in answer.weight_versions)
    add_up(sample, answer.stats)


async def two_turn_session(sample: Sample, context: GenerateContext) -> None:
    """An answer, `rollout.second_turn`, and a second answer, which is the one that is scored.

    The exchange lives on one session server. When that or an engine is lost, it is begun again in another session with
    the same seeds, until the sample's deadline.

    Raises:
        SampleTimeout: the deadline passed; names the last failure.
        InvalidRequest: the exchange itself is wrong, so that repeating it cannot help.
    """
    from miles_hpc.session.errors import InvalidRequest, SessionError, TemplateNotAppendable

    context.prompt_ids(sample)
    backoff_s = _FIRST_BACKOFF_S
    while True:
        try:
            return await _unless_interrupted(_exchange(sample, context), sample, context)
        except (InvalidRequest, TemplateNotAppendable):
            raise
        except SessionError as error:
            if context.left_s <= backoff_s:
                raise SampleTimeout(f"no exchange within rollout.sample_timeout_s; the last one: {error}") from error
            log.warning("sample %d of group %s begins again: %s", sample.index, sample.group, error)
        context.stage("retry")
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


async def _unless_interrupted(exchange: Coroutine[Any, Any, None], sample: Sample, context: GenerateContext) -> None:
    """An exchange cannot go on in a later step: once its group is not needed it is given up, and begins anew then."""
    if not context.config.rollout.partial:
        return await exchange
    work, stop = asyncio.ensure_future(exchange), asyncio.ensure_future(context.until_interrupted())
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        sample.status = "aborted"
    finally:
        work.cancel()
        stop.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)


async def _exchange(sample: Sample, context: GenerateContext) -> None:
    sessions = context.services.sessions
    context.stage("session")
    session = await sessions.create(deadline_s=max(0.1, context.left_s))
    try:
        messages = sample.messages()
        context.stage("first turn")
        first = await sessions.chat(session, messages, context.sampling(sample), deadline_s=context.request_s)
        messages += [first.message, {"role": "user", "content": context.config.rollout.second_turn}]
        context.stage("second turn")
        second = await sessions.chat(session, messages, context.sampling(sample, 1), deadline_s=context.request_s)
        found = await sessions.samples(session)
    except Exception:  # not when cancelled: then nobody waits any more, and the session expires by itself
        await sessions.delete(session, timeout_s=_DELETE_S)
        raise
    await sessions.delete(session, timeout_s=_DELETE_S)
    sample.token_ids = found.token_ids
    sample.loss_mask = found.loss_mask
    sample.logprobs = found.logprobs
    sample.versions = list(found.weight_versions)
    sample.stats = dict(found.stats)
    if found.mismatches is not None:
        kinds = {f"tito_mismatch/{kind}": 1.0 for kind in found.mismatches}
        add_up(sample, {"tito_sessions": 1.0, "tito_mismatched": float(bool(kinds)), **kinds})
    sample.response = second.text
    sample.status = "truncated" if found.finish_reason == "length" else "completed"


async def built_in(sample: Sample, context: GenerateContext) -> None:
    """Every `rollout.session_every`-th prompt is a two-turn exchange, the others and evaluation a single turn."""
    every = context.config.rollout.session_every
    if every and not sample.evaluation and sample.prompt_index % every == 0:
        await two_turn_session(sample, context)
    else:
        await single_turn(sample, context)


def generate_function(path: str) -> GenerateFunction:
    """A built-in one by name, `built_in` for an empty path, or the user's own.

    Raises:
        FunctionPathError: it cannot be imported.
    """
    if path == "multi_turn":
        from miles_hpc.rollout.multi_turn import multi_turn

        return multi_turn
    return BUILT_IN.get(path) or load_function(path, KEY)


BUILT_IN: Mapping[str, GenerateFunction] = {
    "": built_in,
    "single_turn": single_turn,
    "two_turn_session": two_turn_session,
}
