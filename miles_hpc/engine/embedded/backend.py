"""The embedded engine behind the HTTP API: one thread does all torch work, the event loop never waits for it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, TypeVar

import torch

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.engine.embedded.collective import GroupError, UpdateGroup
from miles_hpc.engine.embedded.model import BatchModel
from miles_hpc.engine.embedded.scheduler import Scheduler, Sequence
from miles_hpc.engine.requests import (
    GroupMember,
    Load,
    PauseMode,
    Request,
    Result,
    TensorSpec,
    UpdateOutcome,
    context_length_of,
    read_model_config,
)
from miles_hpc.engine.updates import Groups

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

IDLE_TICK_S = 1.0
"""Between two signs of life of an idle engine thread."""


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
        self._groups: Groups[UpdateGroup] = Groups(GroupError)
        self._seen_at = time.time()
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
                if self._scheduler.can_step():
                    self._scheduler.step()
        except BaseException as error:
            _log.exception("the engine thread failed")
            self._post(self._fail, EngineDied(f"the engine failed: {type(error).__name__}: {error}"))

    def _next_command(self) -> Callable[[], None] | None:
        """A command that is there; None as soon as there is something to compute, or nothing came for a while."""
        if not self._scheduler.paused:
            self._seen_at = time.time()
        try:
            if self._scheduler.can_step() or self._closing:
                return self._commands.get_nowait()
            return self._commands.get(timeout=IDLE_TICK_S)
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

    def partial(self, rid: str) -> Result | None:
        """A copy of what a request has so far, without waiting for the engine thread."""
        sequence = self._scheduler.find(rid)
        if sequence is None:
            return None
        # The thread appends to these lists in turn; what all of them have is a state that was there.
        result = copy.copy(sequence.result)
        versions = list(result.versions)
        count = min(len(result.output_ids), len(result.output_logprobs), versions[-1][2] if versions else 0)
        result.output_ids = result.output_ids[:count]
        result.output_logprobs = result.output_logprobs[:count]
        result.output_top = result.output_top[:count]
        result.versions = []
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
        return await self._when_idle(
            lambda: self._scheduler.update_weights(path, version, flush_cache=flush_cache), abort_all
        )

    async def _when_idle(self, update: Callable[[], UpdateOutcome], abort_all: bool) -> UpdateOutcome:
        future = self._future()

        def enqueue() -> None:
            if abort_all:
                self._scheduler.abort(None)
            self._scheduler.when_idle(lambda: self._post(_resolve, future, update()))

        self._commands.put(enqueue)
        outcome: UpdateOutcome = await future
        return outcome

    async def init_group(self, member: GroupMember) -> UpdateOutcome:
        """Join on the engine thread, which is where the group is used: nothing is generated meanwhile, as in SGLang."""

        def make() -> UpdateGroup:
            return UpdateGroup(
                member.address,
                rank=member.rank,
                world_size=member.world_size,
                name=member.name,
                backend=member.backend,
            )

        return await self._call(lambda: self._groups.join(member, make))

    async def destroy_group(self, name: str) -> UpdateOutcome:
        """Leave a group."""
        return await self._call(lambda: self._groups.leave(name, UpdateGroup.close))

    async def begin_update(self) -> UpdateOutcome:
        """Open a weight update session."""
        return await self._call(self._scheduler.session.begin)

    async def end_update(self) -> UpdateOutcome:
        """Close it."""
        return await self._call(self._scheduler.session.end)

    async def update_weights_from_group(
        self, group: str, tensors: SequenceOf[TensorSpec], version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateOutcome:
        """Receive on the engine thread, then replace; unless paused, after what runs is done."""

        def receive() -> dict[str, torch.Tensor]:
            member = self._groups.find(group)
            if member is None:
                raise GroupError(self._groups.refusal(group))
            found = {one.name: torch.empty(one.shape, dtype=_dtype(one.dtype)) for one in tensors}
            member.broadcast(found.values())
            return found

        return await self._when_idle(
            lambda: self._scheduler.take_tensors(receive, version, flush_cache=flush_cache), abort_all
        )

    async def checksums(self) -> dict[str, str]:
        """Hashed between two steps of the engine thread."""
        return await self._call(self._scheduler.checksums)

    async def answers(self) -> None:
        """Returns between two steps of the engine thread."""
        await self._call(lambda: None)

    async def set_weight_version(self, version: str, *, abort_all: bool) -> None:
        """Change the label from the next token on."""

        def relabel() -> None:
            if abort_all:
                self._scheduler.abort(None)
            self._scheduler.weight_version = version

        await self._call(relabel)

    def load(self) -> Load:
        """Counts, without waiting for the engine thread."""
        return dataclasses.replace(self._scheduler.load(), alive=self._alive(), seen_at=self._seen_at)

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


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise GroupError(f"{name!r} is no dtype of torch")
    return dtype
