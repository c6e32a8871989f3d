"""The embedded engine behind the HTTP API: one thread does all torch work, the event loop never waits for it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.engine.embedded.model import BatchModel
from miles_hpc.engine.embedded.scheduler import Scheduler, Sequence
from miles_hpc.engine.requests import (
    Load,
    PauseMode,
    Request,
    Result,
    UpdateOutcome,
    context_length_of,
    read_model_config,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class EngineDied(RuntimeError):
    """The engine's thread ended with an error; the process must be started again."""


class EmbeddedBackend:
    """Continuous batching over a HF causal LM in fp32. Made and used on the event loop.

    Raises:
        ModelDirError: when the directory lacks a tokenizer or is not a causal LM.
    """

    kind = "embedded"

    def __init__(
        self,
        model_path: str,
        *,
        threads: int = 1,
        chat_template: str = "",
        weight_version: str = "default",
        context_length: int = 0,
        max_running_requests: int = 64,
    ) -> None:
        self.tokenizer = ChatTokenizer(model_path, chat_template, require_template=False)
        self.served_model_name = model_path
        self.model_config: dict[str, Any] = read_model_config(Path(model_path))
        self.context_length = context_length or context_length_of(self.model_config)
        self.max_running_requests = max_running_requests
        torch.set_num_threads(threads)
        model = BatchModel(Path(model_path))
        self.vocab_size = model.vocab_size
        self._scheduler = Scheduler(model, self.tokenizer, model_path, weight_version, max_running_requests)
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._waiters: set[asyncio.Future[Any]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(threads,), name="engine", daemon=True)
        self._thread.start()

    @property
    def model_path(self) -> str:
        """Directory of the weights that are served now."""
        return self._scheduler.model_path

    @property
    def weight_version(self) -> str:
        """Label of the weights that the next token comes from."""
        return self._scheduler.weight_version

    def _run(self, threads: int) -> None:
        # OpenMP's thread count is a property of the calling thread.
        torch.set_num_threads(threads)
        try:
            while True:
                command = self._next_command()
                while command is not None:
                    command()
                    command = self._next_command()
                if self._closing:
                    return
                self._scheduler.step()
        except BaseException as error:
            _log.exception("the engine thread failed")
            self._post(self._fail, EngineDied(f"the engine failed: {type(error).__name__}: {error}"))

    def _next_command(self) -> Callable[[], None] | None:
        """A command that is there, or None as soon as there is something to compute; waits when there is neither."""
        try:
            return self._commands.get(block=not (self._scheduler.can_step() or self._closing))
        except queue.Empty:
            return None

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: no one waits for it any more
            _log.debug("dropped a result after the loop was closed")

    def _fail(self, error: EngineDied) -> None:
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_exception(error)
        if not self._died.done():
            self._died.set_exception(error)

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._died.done():
            self._died.result()
        self._waiters.add(future)
        future.add_done_callback(self._waiters.discard)
        return future

    async def _call(self, function: Callable[[], _T]) -> _T:
        """Run a function between two steps."""
        future = self._future()
        self._commands.put(lambda: self._post(_resolve, future, function()))
        result: _T = await future
        return result

    async def submit(self, request: Request) -> Result:
        """Generate in the running batch."""
        future = self._future()
        sequence = Sequence(request, lambda result: self._post(_resolve, future, result))
        self._commands.put(lambda: self._scheduler.add(sequence))
        try:
            result: Result = await future
        except asyncio.CancelledError:
            self._commands.put(lambda: self._scheduler.discard(sequence))
            raise
        return result

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the step in progress is done."""
        await self._call(lambda: self._scheduler.pause(mode))

    async def resume(self) -> None:
        """Step again."""
        await self._call(self._scheduler.resume)

    async def abort(self, rid: str | None) -> None:
        """End requests with their partial output."""
        await self._call(lambda: self._scheduler.abort(rid))

    async def flush_cache(self) -> bool:
        """False while requests run."""
        return await self._call(self._scheduler.flush_cache)

    async def update_weights_from_disk(
        self, path: str, version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateOutcome:
        """Replace the weights between two steps; unless paused, after what runs is done."""
        future = self._future()

        def update() -> None:
            outcome = self._scheduler.update_weights(path, version, flush_cache=flush_cache)
            self._post(_resolve, future, outcome)

        def enqueue() -> None:
            if abort_all:
                self._scheduler.abort(None)
            self._scheduler.when_idle(update)

        self._commands.put(enqueue)
        outcome: UpdateOutcome = await future
        return outcome

    async def set_weight_version(self, version: str, *, abort_all: bool) -> None:
        """Change the label from the next token on."""

        def relabel() -> None:
            if abort_all:
                self._scheduler.abort(None)
            self._scheduler.weight_version = version

        await self._call(relabel)

    def load(self) -> Load:
        """Counts, without waiting for the engine thread."""
        load = self._scheduler.load()
        return Load(load.running, load.waiting, load.tokens, alive=self._alive())

    def _alive(self) -> bool:
        return self._thread.is_alive() and not self._died.done()

    async def failed(self) -> None:
        """Raise EngineDied when the engine thread fails; waits for that."""
        await asyncio.shield(self._died)

    async def close(self) -> None:
        """Abort everything and end the thread after its step."""
        if self._closing or not self._alive():
            return
        await self._call(lambda: self._scheduler.abort(None))

        def end() -> None:
            self._closing = True

        self._commands.put(end)
        await asyncio.to_thread(self._thread.join, 5.0)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
