"""The running batch: which sequences are in it, and what each step does. Synchronous; owned by one thread."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.engine.embedded.collective import GroupError
from miles_hpc.engine.embedded.model import BatchModel
from miles_hpc.engine.embedded.sampling import Chosen, Sampler, noise_key, top_logprobs
from miles_hpc.engine.embedded.weights import WeightsError
from miles_hpc.engine.requests import ABORTED, Load, PauseMode, Request, Result, UpdateOutcome
from miles_hpc.engine.updates import UpdateSession

PREFILL_TOKENS = 4096
"""Padded prompt tokens that one step may take in beside decoding, so that newcomers do not stall the others."""


class Sequence:
    """A request in the engine: waiting, or one row of the running batch."""

    def __init__(self, request: Request, done: Callable[[Result], None]) -> None:
        self.request = request
        self.done = done
        self.result = Result()
        self.tokens = list(request.input_ids)
        """Prompt and output."""
        seed = request.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        # A token holds at least one byte, so this many last tokens contain any stop text that just became complete.
        self.tail = max((len(text.encode()) for text in request.sampling.stop), default=0) + 1
        self.top = request.top_logprobs_num if request.return_logprob else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's own log-probabilities are still to be computed."""
        request = self.request
        return request.return_logprob and request.logprob_start_len >= 0 and not self.result.input_logprobs


class Scheduler:
    """Continuous batching over a BatchModel.

    Row i of the model is `running[i]`. The cache of a row holds all its tokens but the last.
    """

    def __init__(
        self,
        model: BatchModel,
        tokenizer: ChatTokenizer,
        model_path: str,
        weight_version: str,
        max_running_requests: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._sampler = Sampler(model.vocab_size)
        self._limit = max_running_requests
        self.model_path = model_path
        self.weight_version = weight_version
        self.paused = False
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.generated = 0
        self._barriers: deque[Callable[[], None]] = deque()
        self.session = UpdateSession()

    def can_step(self) -> bool:
        """Whether a step would do something."""
        return not self.paused and bool(self.running or self.waiting)

    def load(self) -> Load:
        """Counts for observers; called from other threads too, so it only reads."""
        running = list(self.running)
        tokens = sum(len(sequence.tokens) for sequence in running)
        return Load(len(running), len(self.waiting), tokens, paused=self.paused, generated=self.generated)

    def find(self, rid: str) -> Sequence | None:
        """A running or waiting request; called from other threads too, so it only reads."""
        return next((one for one in [*self.running, *self.waiting] if one.request.rid == rid), None)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def abort(self, rid: str | None) -> None:
        """End one request (and the samples of it), or all, with their partial output."""
        chosen = [
            sequence
            for sequence in [*self.running, *self.waiting]
            if rid is None or sequence.request.rid == rid or sequence.request.rid.startswith(f"{rid}_")
        ]
        self._end(chosen)

    def discard(self, sequence: Sequence) -> None:
        """End one request whose caller left."""
        if sequence in self.running or sequence in self.waiting:
            self._end([sequence])

    def _end(self, chosen: list[Sequence]) -> None:
        ended = set(map(id, chosen))
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in ended)
        for sequence in chosen:
            sequence.result.finish = ABORTED
        self._leave([row for row, sequence in enumerate(self.running) if id(sequence) in ended])
        for sequence in chosen:
            self._finish(sequence)
        self.run_barriers()

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. `retract` gives the rows up and keeps the tokens; `in_place` keeps both."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for sequence in self.running:
                sequence.result.num_retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running = []
            self._model.clear()
        self.run_barriers()

    def resume(self) -> None:
        """Step again; retracted sequences compute their keys and values anew, under the weights of now."""
        self.paused = False

    def flush_cache(self) -> bool:
        """Nothing is cached beyond running rows; False while there are any, or while requests are about to run."""
        if self.running or (self.waiting and not self.paused):
            return False
        self._model.clear()
        return True

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run an action now if paused or idle, else when what runs is done; nothing starts before it."""
        self._barriers.append(action)
        self.run_barriers()

    def run_barriers(self) -> None:
        """Run what waits for idleness, if it may."""
        while self._barriers and (self.paused or not self.running):
            self._barriers.popleft()()

    def update_weights(self, path: str, version: str | None, *, flush_cache: bool) -> UpdateOutcome:
        """Serve the weights of a directory; the old ones stay when they do not fit."""
        refusal = self._cannot_flush() if flush_cache else ""
        if refusal:
            return UpdateOutcome(False, refusal)
        try:
            self._model.replace(Path(path))
        except WeightsError as error:
            return UpdateOutcome(False, str(error))
        # Set here and not by the caller, who may have left: path and label always tell what is served.
        self.model_path = path
        return UpdateOutcome(True, f"Succeeded to update model weights.{self._label(version)}")

    def _cannot_flush(self) -> str:
        # SGLang swaps the weights here and answers 400 with the old label; refusing first cannot confuse anyone.
        if not self.running:
            return ""
        return (
            f"Weights were not updated: {len(self.running)} requests are paused in place, so the cache cannot be "
            "flushed. Retract or finish them, or send flush_cache=false."
        )

    def _label(self, version: str | None) -> str:
        if version is None:
            return ""
        self.weight_version = version
        return f" Weight version updated to {version}."

    def checksums(self) -> dict[str, str]:
        """Tensor name -> checksum."""
        return self._model.checksums()

    def take_tensors(
        self, receive: Callable[[], dict[str, torch.Tensor]], version: str | None, *, flush_cache: bool
    ) -> UpdateOutcome:
        """Serve the tensors that `receive` returns; the old ones stay when it fails or they do not fit."""
        refusal = self.session.refusal() or (self._cannot_flush() if flush_cache else "")
        if refusal:
            return UpdateOutcome(False, refusal)
        try:
            self._model.take(receive())
        except (GroupError, WeightsError) as error:
            return UpdateOutcome(False, f"Failed to receive weights: {error}")
        return UpdateOutcome(True, f"Succeeded to update parameter online.{self._label(version)}")

    def step(self) -> None:
        """Take in newcomers, whose first token comes from their prefill, and add a token to all that ran before."""
        with torch.inference_mode():
            old = len(self.running)
            if self.waiting and not self._barriers and old < self._limit:
                self._admit()
            if old:
                self._decode(old)
        self.run_barriers()

    def _admit(self) -> None:
        newcomers: list[Sequence] = []
        longest = 0
        while self.waiting and len(self.running) + len(newcomers) < self._limit:
            sequence = self.waiting[0]
            longest = max(longest, len(sequence.tokens))
            alone = sequence.wants_prompt_logprobs
            if newcomers and (alone or longest * (len(newcomers) + 1) > PREFILL_TOKENS):
                break
            newcomers.append(self.waiting.popleft())
            if alone:
                break
        now = time.time()
        for sequence in newcomers:
            sequence.result.started_at = sequence.result.started_at or now
        first_row = len(self.running)
        if newcomers[0].wants_prompt_logprobs:
            logits = self._model.prefill([newcomers[0].tokens], first_row, whole=True)
            _prompt_logprobs(newcomers[0], logits)
            logits = logits[-1:].clone()
        else:
            logits = self._model.prefill([sequence.tokens for sequence in newcomers], first_row)
        self.running += newcomers
        self._advance(range(first_row, len(self.running)), logits)

    def _decode(self, count: int) -> None:
        # Rows behind `count` joined in this step and have their token; if some of them left again, only rows of
        # theirs moved.
        rows = self.running[:count]
        logits = self._model.decode([row.tokens[-1] for row in rows], [len(row.tokens) - 1 for row in rows])
        self._advance(range(len(rows)), logits)

    def _advance(self, rows: range, logits: torch.Tensor) -> None:
        """Sample one token for each of the rows, and let the finished ones leave."""
        sequences = [self.running[row] for row in rows]
        params = [sequence.request.sampling for sequence in sequences]
        for index, sequence in enumerate(sequences):
            if len(sequence.result.output_ids) < params[index].min_new_tokens:
                # A tokenizer may name ids that the model has no row for, and a client any number.
                stops = [one for one in sorted(params[index].stop_token_ids) if 0 <= one < logits.shape[1]]
                logits[index, stops] = -torch.inf
        keys = [noise_key(sequence.seed, len(sequence.result.output_ids)) for sequence in sequences]
        chosen = self._sampler.choose(logits, params, keys, [sequence.top for sequence in sequences])
        finished = [row for index, row in enumerate(rows) if self._append(sequences[index], chosen, index)]
        ended = [self.running[row] for row in finished]
        self._leave(finished)
        for sequence in ended:
            self._finish(sequence)

    def _append(self, sequence: Sequence, chosen: Chosen, index: int) -> bool:
        """Add a token to a sequence; whether that ended it."""
        result, sampling = sequence.result, sequence.request.sampling
        if sampling.max_new_tokens == 0:
            result.finish = {"type": "length", "length": 0}
            return True
        token = chosen.tokens[index]
        sequence.tokens.append(token)
        result.output_ids.append(token)
        result.output_logprobs.append(chosen.logprobs[index])
        if sequence.top:
            result.output_top.append(chosen.top[index])
        result.produced(1, self.weight_version)
        self.generated += 1
        if result.first_token_at == 0.0:
            result.first_token_at = time.time()
        count = len(result.output_ids)
        if count >= sampling.min_new_tokens:
            if token in sampling.stop_token_ids:
                result.finish = {"type": "stop", "matched": token}
                return True
            if sampling.stop:
                text = self._tokenizer.decode(result.output_ids[-sequence.tail :])
                for stop in sampling.stop:
                    if stop in text:
                        result.finish = {"type": "stop", "matched": stop}
                        return True
        if count >= sampling.max_new_tokens:
            result.finish = {"type": "length", "length": sampling.max_new_tokens}
            return True
        return False

    def _leave(self, rows: list[int]) -> None:
        """Take rows out of the batch; the last rows fill their places."""
        for row in sorted(rows, reverse=True):
            last = self.running.pop()
            if row < len(self.running):
                self._model.move_row(len(self.running), row, len(last.tokens))
                self.running[row] = last
        if rows and not self.running:
            self._model.clear()

    @staticmethod
    def _finish(sequence: Sequence) -> None:
        sequence.result.finished_at = time.time()
        sequence.done(sequence.result)


def _prompt_logprobs(sequence: Sequence, logits: torch.Tensor) -> None:
    """Log-probabilities of the prompt's own tokens, under softmax(logits), from `logprob_start_len` on."""
    ids = sequence.request.input_ids
    start = min(sequence.request.logprob_start_len, len(ids) - 1)
    logprobs = torch.log_softmax(logits[: len(ids)], dim=-1)
    for position in range(start, len(ids)):
        token = ids[position]
        value = None if position == 0 else float(logprobs[position - 1, token])
        sequence.result.input_logprobs.append((value, token))
        if sequence.top:
            row = None if position == 0 else top_logprobs(logprobs[position - 1], sequence.top)
            sequence.result.input_top.append(row)
