"""fake_engine: SGLang's HTTP API over scripted tokens, without torch. For tests of everything around an engine.

Tokens are a pure function of (input ids, seed, index): weights, batch and time do not change them. The text answers the
arithmetic question in the prompt, or repeats its first number, rightly in about half of all (prompt, seed) pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hashlib
import re
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.engine.requests import (
    ABORTED,
    GroupMember,
    Load,
    PauseMode,
    Request,
    Result,
    TensorSpec,
    UpdateOutcome,
    context_length_of,
    mix64,
    read_model_config,
)
from miles_hpc.engine.updates import Groups, UpdateSession
from miles_hpc.wire.program import setup_logging

_QUESTION = re.compile(r"(-?\d+)[ \t]*([-+*x×])[ \t]*(-?\d+)")
_NUMBER = re.compile(r"-?\d+")
_FEW = 256
"""Fillers that are drawn one by one; more of them would hold up all other answers."""
RIGHT_SHARE = 0.5
"""Share of (prompt, seed) pairs that are answered rightly."""


def right_answer(prompt: str) -> str | None:
    """The answer to the last `a + b`, `a - b` or `a * b` in a prompt, else its first number, else None."""
    questions = _QUESTION.findall(prompt)
    if questions:
        left, operator, right = questions[-1]
        if operator == "+":
            return str(int(left) + int(right))
        return str(int(left) - int(right)) if operator == "-" else str(int(left) * int(right))
    number = _NUMBER.search(prompt)
    return number.group() if number else None


class Script:
    """Answers by script. Pure: the same tokenizer, ids and seed give the same tokens everywhere."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._fillers = tokenizer.encode("0123456789") or [0]

    def key(self, request: Request) -> int:
        """What the answer depends on beside the index: the ids, and the seed unless greedy."""
        seed = 0 if request.sampling.greedy else request.sampling.seed or 0
        ids = struct.pack(f"<{len(request.input_ids)}q", *request.input_ids)
        digest = hashlib.blake2b(ids, digest_size=8, key=struct.pack("<Q", seed & (1 << 64) - 1)).digest()
        return int.from_bytes(digest, "little")

    def head(self, request: Request) -> list[int]:
        """How the answer begins: the text, and the model's stop id."""
        key = self.key(request)
        answer = right_answer(self._tokenizer.decode(request.input_ids))
        if answer is None:
            answer = str(mix64(key) % 100)
        elif mix64(key) / 2**64 >= RIGHT_SHARE:
            answer = str(int(answer) + 1 + mix64(key + 1) % 9)
        return [*self._tokenizer.encode(answer), *self._tokenizer.stop_token_ids[:1]]

    def filler(self, key: int, number: int) -> int:
        """The token `number` places behind the head, counted from 1."""
        return self._fillers[mix64(key + number) % len(self._fillers)]

    def logprob(self, key: int, index: int) -> float:
        """Log-probability that is claimed for output token `index`, in [-2.05, -0.05]."""
        return -0.05 - 2.0 * (mix64(key ^ mix64(index)) / 2**64)

    def answer(self, request: Request) -> Result:
        """The whole result, without times and versions."""
        sampling = request.sampling
        result = Result(finish={"type": "length", "length": sampling.max_new_tokens})
        key = self.key(request)
        head = self.head(request)
        stoppable = bool(sampling.stop) or not sampling.stop_token_ids.isdisjoint(self._fillers)
        for index in range(sampling.max_new_tokens if stoppable else min(len(head), sampling.max_new_tokens)):
            token = head[index] if index < len(head) else self.filler(key, index - len(head) + 1)
            result.output_ids.append(token)
            result.output_logprobs.append(self.logprob(key, index))
            if index + 1 <= sampling.min_new_tokens:
                continue
            if token in sampling.stop_token_ids:
                result.finish = {"type": "stop", "matched": token}
                break
            matched = self._matched_text(result.output_ids, sampling.stop)
            if matched is not None:
                result.finish = {"type": "stop", "matched": matched}
                break
        if result.finish["type"] == "length":
            self._fill_up(result, key, len(head), sampling.max_new_tokens)
        if request.return_logprob and request.top_logprobs_num:
            pairs = zip(result.output_logprobs, result.output_ids, strict=True)
            result.output_top = [[(logprob, token)] for logprob, token in pairs]
        if request.return_logprob and request.logprob_start_len >= 0:
            start = request.logprob_start_len
            result.input_logprobs = [
                (None if i == 0 else self.logprob(~key, i), token)
                for i, token in enumerate(request.input_ids)
                if i >= start
            ]
            result.input_top = [None if value is None else [(value, t)] for value, t in result.input_logprobs]
        return result

    def _fill_up(self, result: Result, key: int, head: int, tokens: int) -> None:
        """The fillers that are missing."""
        begun = len(result.output_ids)
        if tokens - begun > _FEW:
            from miles_hpc.engine.fake_fillers import fillers

            which, logprobs = fillers(key, head, begun, tokens, len(self._fillers))
            result.output_ids += [self._fillers[one] for one in which]
            result.output_logprobs += logprobs
            return
        for index in range(begun, tokens):
            result.output_ids.append(self.filler(key, index - head + 1))
            result.output_logprobs.append(self.logprob(key, index))

    def _matched_text(self, ids: list[int], stop: tuple[str, ...]) -> str | None:
        if not stop:
            return None
        text = self._tokenizer.decode(ids)
        return next((one for one in stop if one in text), None)


class _Running:
    """One request in flight; its tokens become visible with time, one timer for the whole answer."""

    def __init__(self, request: Request, answer: Result, done: asyncio.Future[Result]) -> None:
        self.request = request
        self.answer = answer
        self.done = done
        self.produced = 0
        self.running_since: float | None = None
        self.timer: asyncio.TimerHandle | None = None


class FakeBackend:
    """The backend. Requests cost one timer each; a token takes `token_ms`."""

    kind = "fake"

    def __init__(
        self,
        model_path: str,
        *,
        token_ms: float = 1.0,
        chat_template: str = "",
        weight_version: str = "default",
        context_length: int = 0,
        max_running_requests: int = 4096,
    ) -> None:
        self.tokenizer = ChatTokenizer(model_path, chat_template, require_template=False)
        self.model_path = self.served_model_name = model_path
        self.weight_version = weight_version
        self.model_config: dict[str, Any] = read_model_config(Path(model_path))
        self.vocab_size = self.tokenizer.vocab_size
        self.context_length = context_length or context_length_of(self.model_config)
        self.max_running_requests = max_running_requests
        self._token_s = token_ms / 1e3
        self._script = Script(self.tokenizer, self.vocab_size)
        self._live: dict[str, _Running] = {}
        self._paused = False
        self._seen_at = time.time()
        self._updating = False
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._update_lock = asyncio.Lock()
        self._groups: Groups[GroupMember] = Groups()
        self._session = UpdateSession()
        self._received: dict[str, str] = {}

    async def submit(self, request: Request) -> Result:
        """Answer by script after the time that the tokens take."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        run = _Running(request, self._script.answer(request), done)
        self._live[request.rid] = run
        try:
            if not self._paused and not self._updating:
                self._start(run)
            return await done
        finally:
            self._forget(run)

    def _start(self, run: _Running) -> None:
        if run.running_since is not None or run.done.done():
            return
        now = time.time()
        run.answer.started_at = run.answer.started_at or now
        run.running_since = now
        self._running += 1
        self._quiet.clear()
        left = len(run.answer.output_ids) - run.produced
        run.timer = asyncio.get_running_loop().call_later(left * self._token_s, self._complete, run)

    def _settle(self, run: _Running, *, all_tokens: bool = False) -> None:
        """Account the tokens that were produced until now to the current weight version."""
        if run.running_since is None:
            return
        now = time.time()
        left = len(run.answer.output_ids) - run.produced
        count = left
        if not all_tokens and self._token_s > 0:
            count = min(left, int((now - run.running_since) / self._token_s))
        if count and run.answer.first_token_at == 0.0:
            run.answer.first_token_at = min(now, run.running_since + self._token_s)
        run.answer.produced(count, self.weight_version)
        run.produced += count
        run.running_since += count * self._token_s

    def _stop(self, run: _Running, *, all_tokens: bool = False) -> None:
        if run.running_since is None:
            return
        self._settle(run, all_tokens=all_tokens)
        if run.timer is not None:
            run.timer.cancel()
        run.timer = run.running_since = None
        self._running -= 1
        if self._running == 0:
            self._quiet.set()

    def _complete(self, run: _Running) -> None:
        self._stop(run, all_tokens=True)
        self._resolve(run)

    def _abort(self, run: _Running) -> None:
        self._stop(run)
        answer, count = run.answer, run.produced
        answer.output_ids = answer.output_ids[:count]
        answer.output_logprobs = answer.output_logprobs[:count]
        answer.output_top = answer.output_top[:count]
        answer.finish = ABORTED
        self._resolve(run)

    def _resolve(self, run: _Running) -> None:
        run.answer.finished_at = time.time()
        if not run.done.done():
            run.done.set_result(run.answer)
        self._forget(run)

    def _forget(self, run: _Running) -> None:
        self._stop(run)
        if self._live.get(run.request.rid) is run:
            del self._live[run.request.rid]

    def partial(self, rid: str) -> Result | None:
        """The tokens that a request has by now."""
        run = self._live.get(rid)
        if run is None:
            return None
        self._settle(run)
        result = copy.copy(run.answer)
        result.output_ids = result.output_ids[: run.produced]
        result.output_logprobs = result.output_logprobs[: run.produced]
        result.output_top = result.output_top[: run.produced]
        result.versions = []
        result.finish = {}
        return result

    async def pause(self, mode: PauseMode) -> None:
        """Stop all timers; retract and in_place differ only in the counted retractions."""
        self._paused = True
        for run in list(self._live.values()):
            if mode == "abort":
                self._abort(run)
                continue
            if mode == "retract" and run.running_since is not None:
                run.answer.num_retractions += 1
            self._stop(run)

    async def resume(self) -> None:
        """Start every waiting request."""
        self._paused = False
        if not self._updating:
            self._start_all()

    def _start_all(self) -> None:
        for run in self._live.values():
            self._start(run)

    async def abort(self, rid: str | None) -> None:
        """End requests with the tokens that they have."""
        for run in list(self._live.values()):
            if rid is None or run.request.rid == rid or run.request.rid.startswith(f"{rid}_"):
                self._abort(run)

    async def flush_cache(self) -> bool:
        """There is no cache; refused like SGLang does while requests run."""
        return self._running == 0

    async def update_weights_from_disk(
        self, path: str, version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateOutcome:
        """Take the label of a directory that holds a file; unless paused, after the running requests."""
        return await self._when_quiet(lambda: self._take(Path(path), version), abort_all)

    async def _when_quiet(self, update: Callable[[], UpdateOutcome], abort_all: bool) -> UpdateOutcome:
        if abort_all:
            await self.abort(None)
        async with self._update_lock:
            self._updating = True
            try:
                if not self._paused:
                    await self._quiet.wait()
                return update()
            finally:
                self._updating = False
                if not self._paused:
                    self._start_all()

    def _take(self, path: Path, version: str | None) -> UpdateOutcome:
        if not path.is_dir():
            return UpdateOutcome(False, f"Failed to get weights iterator: no directory {path}.")
        if not any(entry.is_file() for entry in path.iterdir()):
            return UpdateOutcome(False, f"Failed to get weights iterator: {path} holds no file.")
        self.model_path = str(path)
        return self._taken("Succeeded to update model weights.", version)

    def _taken(self, text: str, version: str | None) -> UpdateOutcome:
        self._relabel(version)
        return UpdateOutcome(True, text if version is None else f"{text} Weight version updated to {version}.")

    async def set_weight_version(self, version: str, *, abort_all: bool) -> None:
        """Change the label."""
        if abort_all:
            await self.abort(None)
        self._relabel(version)

    def _relabel(self, version: str | None) -> None:
        for run in self._live.values():
            self._settle(run)
        if version is not None:
            self.weight_version = version

    async def init_group(self, member: GroupMember) -> UpdateOutcome:
        """Join by name alone: a script meets nobody, so the sender must not wait for it."""
        return self._groups.join(member, lambda: member)

    async def destroy_group(self, name: str) -> UpdateOutcome:
        """Leave a group."""
        return self._groups.leave(name)

    async def begin_update(self) -> UpdateOutcome:
        """Open a session."""
        return self._session.begin()

    async def end_update(self) -> UpdateOutcome:
        """Close it."""
        return self._session.end()

    async def update_weights_from_group(
        self, group: str, tensors: Sequence[TensorSpec], version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateOutcome:
        """Note which tensors were announced, and take the label; unless paused, after the running requests."""
        if refusal := self._session.refusal() or self._groups.refusal(group):
            return UpdateOutcome(False, refusal)
        return await self._when_quiet(lambda: self._receive(tensors, version), abort_all)

    def _receive(self, tensors: Sequence[TensorSpec], version: str | None) -> UpdateOutcome:
        self._received.update((tensor.name, f"{tensor.dtype}{list(tensor.shape)}") for tensor in tensors)
        return self._taken("Succeeded to update parameter online.", version)

    async def checksums(self) -> dict[str, str]:
        """The label, and what was announced of each tensor that was broadcast."""
        return {"script": self.weight_version, **self._received}

    async def answers(self) -> None:
        """A script always answers."""

    def load(self) -> Load:
        """Running and waiting requests."""
        running = (run for run in self._live.values() if run.running_since is not None)
        tokens = sum(len(run.request.input_ids) + run.produced for run in running)
        if not self._paused:
            self._seen_at = time.time()
        return Load(self._running, len(self._live) - self._running, tokens, paused=self._paused, seen_at=self._seen_at)

    async def failed(self) -> None:
        """A script does not fail."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Abort everything."""
        await self.abort(None)


async def _main(args: argparse.Namespace) -> None:
    from miles_hpc.engine.api import common_settings, serve

    backend = FakeBackend(args.model_path, token_ms=args.token_ms, **common_settings(args))
    await serve(backend, args)


def main(argv: list[str] | None = None) -> int:
    """Run the fake engine until SIGTERM; 2 when the model directory is not usable, 1 when the port is not."""
    from miles_hpc.engine.api import add_arguments, run_program

    parser = argparse.ArgumentParser(prog="python -m miles_hpc.engine.fake", description="Scripted engine for tests.")
    add_arguments(parser)
    parser.add_argument("--token-ms", type=float, default=1.0, help="time that one token takes, in milliseconds")
    args = parser.parse_args(argv)
    setup_logging()
    return run_program(parser, _main(args))


if __name__ == "__main__":
    raise SystemExit(main())
