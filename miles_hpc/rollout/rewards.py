"""Rewards. One that raises, hangs or is not a finite number fails its sample; it never becomes a zero."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from miles_hpc.rollout.functions import load_function
from miles_hpc.rollout.reward_batches import RewardBatches
from miles_hpc.rollout.sample import Sample
from miles_hpc.wire.time_limit import within

KEY = "reward.function"
_START_S = 120.0
"""Until a reward process has imported its function."""


class RewardError(Exception):
    """A reward function failed; the text holds its traceback."""


class RewardTimeout(RewardError):
    """A reward function did not return in `reward.timeout_s`."""


def exact_match(sample: Sample) -> float:
    """1.0 when the response is the label, both without space around them."""
    return float(sample.response.strip() == str(sample.label).strip())


def math_verify(sample: Sample) -> float:
    """1.0 when response and label are mathematically equal (https://github.com/huggingface/Math-Verify).

    A response in which no answer is found is wrong. Uses SIGALRM: main thread only.

    Raises:
        ValueError: the label holds no mathematical expression.
    """
    from math_verify import parse, verify

    label = str(sample.label)
    gold = parse(label) or parse(f"${label}$")
    if not gold:
        raise ValueError(f"label {label!r:.80} of prompt {sample.prompt_index} is no mathematical expression")
    return float(verify(gold, parse(sample.response)))


def reasoning_gym(sample: Sample) -> float:
    """The verifier of the sample's reasoning-gym task; what stands in `<answer>` tags is judged, or the whole response.

    Raises:
        KeyError: the sample is no problem of `[data.reasoning_gym]`.
    """
    from reasoning_gym.factory import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    entry = sample.metadata["entry"]
    score = get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score(extract_answer(sample.response) or sample.response.strip(), entry))


BUILT_IN: dict[str, Callable[[Sample], float]] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}


def reward_function(path: str) -> Callable[[Sample], float | Awaitable[float]]:
    """A built-in by name, or the user's own by dotted path.

    Raises:
        FunctionPathError: it cannot be imported.
    """
    return BUILT_IN.get(path) or load_function(path, KEY)


class Reward(float):
    """A finite reward. `category` is a word that the function sorted the answer under, for the step's metrics."""

    category: str = ""


def checked(value: Any) -> Reward:
    """What a function returned as a reward: a number, or {"reward": number, "category": word}.

    Raises:
        RewardError: it is no number, or not finite.
    """
    number, category = value, ""
    if isinstance(value, Mapping):
        number, category = value.get("reward"), str(value.get("category", ""))
    try:
        reward = Reward(number)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward is {value!r:.80}; expected a number") from error
    if not math.isfinite(reward):
        raise RewardError(f"the reward is {float(reward)}; expected a finite number")
    reward.category = category
    return reward


def plain(value: Any) -> Any:
    """What a function returned, in a form that leaves its process; judged by `checked` where it arrives."""
    if isinstance(value, Mapping):
        return {"reward": plain(value.get("reward")), "category": str(value.get("category", ""))}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"{value!r:.80}"


class Scorer:
    """Scores samples under a deadline.

    Coroutine functions run in this event loop, `exact_match` at once; every other function runs in a process of its own
    (`reward_process`), where it has the main thread for its signals, blocks nobody, and can be killed when it hangs.

    Args:
        path: `reward.function`.
        timeout_s: `reward.timeout_s`, counted from when the function begins.
        processes: that run a plain function at once.
        url: of `remote_http`.
        batch_size, batch_wait_s: above 0, the function takes samples of all groups at once; see `RewardBatches`.

    Raises:
        FunctionPathError: the path cannot be imported.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout_s: float,
        processes: int = 2,
        url: str = "",
        batch_size: int = 0,
        batch_wait_s: float = 0.0,
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._inline: Callable[[Sample], float] | None = None
        self._coroutine: Callable[[Any], Awaitable[Any]] | None = None
        self._idle: asyncio.Queue[_RewardProcess | None] = asyncio.Queue()
        self._processes: set[_RewardProcess] = set()
        self._remote: RemoteReward | None = None
        self._batches = RewardBatches(self._call_many, size=batch_size, wait_s=batch_wait_s) if batch_size else None
        if path == "exact_match":
            self._inline = exact_match
        elif path == "remote_http":
            self._remote = RemoteReward(url)
            self._coroutine = self._remote.score
        elif path not in BUILT_IN and inspect.iscoroutinefunction(function := load_function(path, KEY)):
            self._coroutine = function
        else:
            for _ in range(processes):
                self._idle.put_nowait(None)

    async def score(self, sample: Sample) -> Reward:
        """The reward of a finished sample.

        Raises:
            RewardTimeout: the function hung.
            RewardError: it raised, or returned something else than a finite number.
        """
        if self._batches is not None:
            return checked(await self._batches.score(sample))
        return checked(await self._call(sample, f"sample {sample.index} of group {sample.group}"))

    async def score_group(self, samples: list[Sample]) -> list[Reward]:
        """The rewards of a group, when the function takes the list of its samples (`reward.scope = "group"`).

        Raises:
            RewardTimeout, RewardError: as `score`, and when it does not return one reward for each sample.
        """
        return [checked(value) for value in await self._call_many(samples)]

    async def _call_many(self, samples: list[Sample]) -> list[Any]:
        groups = sorted({sample.group for sample in samples})
        answer = await self._call(samples, f"{len(samples)} samples of group {groups[0]}{' …' if groups[1:] else ''}")
        if not isinstance(answer, list | tuple) or len(answer) != len(samples):
            raise RewardError(
                f"{KEY} = {self._path!r} returned {answer!r:.80} for {len(samples)} samples; expected a list of as "
                f"many numbers"
            )
        return list(answer)

    async def _call(self, what: Any, name: str) -> Any:
        try:
            if self._inline is not None:
                return self._inline(what)
            if self._coroutine is not None:
                return await within(self._timeout_s, self._coroutine(what))
            return await self._in_process(what)
        except asyncio.TimeoutError as error:
            raise RewardTimeout(
                f"{KEY} = {self._path!r} did not return within reward.timeout_s = {self._timeout_s:g} s for {name}"
            ) from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(traceback.format_exc()) from error

    async def _in_process(self, what: Any) -> Any:
        process = await self._idle.get()
        try:
            if process is None:
                process = _RewardProcess(self._path)
                self._processes.add(process)
                await process.start()
            bare = [_bare(one) for one in what] if isinstance(what, list) else _bare(what)
            return await within(self._timeout_s, process.call(bare))
        except RewardError:
            raise
        except BaseException:  # hung, died, or cancelled in the middle of an answer: of no further use
            if process is not None:
                await self._discard(process)
                process = None
            raise
        finally:
            self._idle.put_nowait(process if process is not None and process.usable else None)

    async def _discard(self, process: _RewardProcess) -> None:
        self._processes.discard(process)
        await process.kill()

    async def close(self) -> None:
        """End calls that gather, and kill the reward processes."""
        if self._batches is not None:
            await self._batches.close()
        for process in list(self._processes):
            await self._discard(process)
        if self._remote is not None:
            await self._remote.close()


def _bare(sample: Sample) -> Sample:
    """A sample without its arrays, which no reward needs, and with a plain reward: msgpack knows neither."""
    reward = None if sample.reward is None else float(sample.reward)
    return msgspec.structs.replace(sample, extra={}, reward=reward)


class RemoteReward:
    """Posts {prompt, response, label, metadata} as JSON and takes {"reward": number} or a number.

    Args:
        url: where to.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._http: Any = None

    async def score(self, sample: Sample) -> Any:
        """Raises RewardError for another status than 200, or an answer without a reward."""
        import aiohttp

        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False)
        body = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        try:
            async with self._http.post(self._url, json=body) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            raise RewardError(f"reward.url = {self._url}: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise RewardError(f"reward.url = {self._url} answered {answer.status}: {text:.200}")
        try:
            found = msgspec.json.decode(text)
        except msgspec.MsgspecError as error:
            raise RewardError(f"reward.url = {self._url} answered no JSON: {text:.200}") from error
        if isinstance(found, dict):
            if "reward" not in found:
                raise RewardError(f"reward.url = {self._url} answered {text:.200}; expected a number as reward")
            return found["reward"]
        return found

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()


class _RewardProcess:
    """One child that runs a plain reward function, called over its standard input and output."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._child: asyncio.subprocess.Process | None = None

    @property
    def usable(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def start(self) -> None:
        """Raises RewardError when the function does not import there, or nothing is heard of it in time."""
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "miles_hpc.rollout.reward_process", self._path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        await within(_START_S, self._answer())

    async def call(self, what: Any) -> Any:
        """Raises RewardError with the child's traceback."""
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(pack_message(what))
        await self._child.stdin.drain()
        return await self._answer()

    async def _answer(self) -> Any:
        assert self._child is not None and self._child.stdout is not None
        try:
            (size,) = struct.unpack("<I", await self._child.stdout.readexactly(4))
            error, value = msgspec.msgpack.decode(await self._child.stdout.readexactly(size))
        except asyncio.IncompleteReadError:
            code = await self._child.wait()
            raise RewardError(f"the process of {KEY} = {self._path!r} ended with code {code}") from None
        if error:
            raise RewardError(error)
        return value

    async def kill(self) -> None:
        """End the child and reap it."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()


def pack_message(message: Any) -> bytes:
    """Length, little-endian uint32, and msgpack."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body
