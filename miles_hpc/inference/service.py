"""What others ask of the controller of one model: windows, readiness, weights, cells."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from miles_hpc.inference import controller as decisions
from miles_hpc.inference.book import ENGINE_POOLS
from miles_hpc.inference.engine_api import EngineApi, EngineError
from miles_hpc.inference.keeper import EngineKeeper
from miles_hpc.inference.windows import (
    ControllerError,
    Disposed,
    EngineInfo,
    ServingTimeout,
    WindowTimeout,
)
from miles_hpc.wire.ids import Generation, parse_cell_id
from miles_hpc.wire.messages import CellRow
from miles_hpc.wire.sockets import HubError

log = logging.getLogger(__name__)

_CELLS_EVERY_S = 2.0
"""Between two looks at which cells an operator has stopped, while a window waits for engines."""

Handler = Callable[[dict[str, Any], list[memoryview]], Awaitable[Any]]


class Orders(Protocol):
    """What is used of an OperatorClient; its calls block, and raise HubError."""

    def cells(self) -> list[CellRow]: ...

    def stop_cell(self, cell: str, generation: Generation, reason: str = "") -> None: ...

    def start_cell(self, cell: str) -> None: ...


def _owner(named: Any) -> decisions.Owner | None:
    return decisions.Owner(str(named[0]), Generation.parse(named[1])) if named else None


class ControllerService(EngineKeeper):
    """What others ask of a controller. See `EngineKeeper` for what it is made of.

    Args:
        orders: carries out what is ordered of cells; None: nothing can be.
    """

    def __init__(self, *args: Any, orders: Orders | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._orders = orders
        self._ordering = asyncio.Lock()
        self._stopped: set[str] = set()
        self._ordered: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    def methods(self) -> dict[str, Handler]:
        """Handlers for `RpcServer`; after `dispose` each raises Disposed."""
        return {name: self._unless_disposed(handler) for name, handler in self._handlers().items()}

    def _unless_disposed(self, handler: Handler) -> Handler:
        async def call(params: dict[str, Any], frames: list[memoryview]) -> Any:
            if self._disposed and handler != self.on_dispose:
                raise Disposed(f"the controller of model {self._model or 'policy'!r} was disposed of")
            return await handler(params, frames)

        return call

    def _handlers(self) -> dict[str, Handler]:
        return {
            "start_update_weights": self.start_update_weights,
            "end_update_weights": self.end_update_weights,
            "abort_update_weights": self.abort_update_weights,
            "renew_window": self.renew_window,
            "abort_all": self.abort_all,
            "check_weights": self.check_weights,
            "published": self.set_published,
            "status": self.get_status,
            "wait_serving": self.wait_serving,
            "stop_cell": self.stop_cell,
            "start_cell": self.start_cell,
            "dispose": self.on_dispose,
        }

    async def start_update_weights(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{timeout_s, engines?, owner?: [cell, generation]} -> Window. Waits its turn, and for `engines` (default: all)
        to be ready. A window with an owner is aborted when the owner leaves the address book, or does not renew it.

        Raises:
            WindowTimeout: at the deadline, with what was still missing.
        """
        if not self.state.updated:
            raise ControllerError(f"model {self._model!r} serves the weights that it was started with: no window opens")
        timeout_s, asked = float(params["timeout_s"]), params.get("engines")
        deadline = time.monotonic() + timeout_s
        wanted = self._wanted(asked)
        obstacle, turn = "", object()
        self._turns.append(turn)
        self.state.window_wanted = True
        try:
            while obstacle := self._obstacle(turn, wanted):
                self._look_at_cells()
                await self._wait_change(deadline, f"weight window: {obstacle}", self._patience_s())
                wanted = self._wanted(asked)
            now = time.monotonic()
            owner = _owner(params.get("owner"))
            lease = now + self._lease_s if owner is not None else float("inf")
            window_id = uuid.uuid4().hex[:12]
            window = self.state.open_window(window_id, wanted, now + self._window_timeout_s, owner, lease)
        except asyncio.TimeoutError as error:
            raise WindowTimeout(f"no weight window within {timeout_s:g} s: {obstacle}") from error
        finally:
            self._turns.remove(turn)
            self.state.window_wanted = bool(self._turns)
            self._notify()
        self._keep_hold()
        log.info("window %s: begins with %d engines", window.window_id, len(window.engines))
        return msgspec.to_builtins(window)

    def _obstacle(self, turn: object, wanted: int) -> str:
        return "another caller waits for a window" if self._turns[0] is not turn else self.state.window_obstacle(wanted)

    def _wanted(self, asked: int | None) -> int:
        """Engines that a window waits for: those asked for, else all but stopped ones and lost external ones."""
        if asked is not None:
            return int(asked)
        missing = len(self._stopped) + sum(
            engine.generation.n > 1 and not self.state.is_fit(engine) for engine in self._external.values()
        )
        return max(1, self._engines_wanted - missing)

    def _patience_s(self) -> float:
        return _CELLS_EVERY_S if self._orders is not None else float("inf")

    def _look_at_cells(self) -> None:
        """Begin to learn which engines an operator has stopped; nobody waits for a hub that does not answer."""
        if self._orders is None or (self._looking is not None and not self._looking.done()):
            return
        self._looking = asyncio.ensure_future(self._learn_stopped(self._orders))

    async def _learn_stopped(self, orders: Orders) -> None:
        try:
            rows = await self._ask(orders.cells)
        except HubError as error:
            log.info("which cells are stopped is not known: %s", error)
            return
        states = {row.cell: row.state for row in rows if self._is_own_engine(row.cell)}
        # What was ordered here is on its way down until the hub says that it is there again.
        self._ordered -= {cell for cell, state in states.items() if state == "ready"}
        stopped = {cell for cell, state in states.items() if state == "stopped"} | self._ordered
        if stopped != self._stopped:
            self._stopped = stopped
            self._notify()

    def _is_own_engine(self, cell: str) -> bool:
        try:
            pool, _ = parse_cell_id(cell)
        except ValueError:
            return False
        return pool.startswith(ENGINE_POOLS) and (
            not self._model or pool.removeprefix(ENGINE_POOLS).rpartition("-")[0] == self._model
        )

    async def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        async with self._ordering:
            return await asyncio.to_thread(call, *arguments)

    async def stop_cell(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{cell, reason}: the hub stops an engine, after the weight window if one is open, until it is started again.

        Raises:
            ControllerError: when it is no engine of this model, or the hub refuses.
        """
        cell = self._engine_cell(params["cell"])
        engine = self.state.engines.get(cell)
        if engine is None:
            raise ControllerError(f"{cell} is not running: it is started again, or was stopped before")
        await self._order("stop_cell", cell, engine.info.generation, str(params.get("reason") or ""))
        self._ordered.add(cell)
        self._stopped.add(cell)
        self._notify()

    async def start_cell(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{cell}: a stopped engine is wanted again. Raises as `stop_cell`."""
        cell = self._engine_cell(params["cell"])
        await self._order("start_cell", cell)
        self._ordered.discard(cell)
        self._stopped.discard(cell)

    def _engine_cell(self, cell: str) -> str:
        if cell in self._external:
            raise ControllerError(f"{cell} is an external engine: it is neither started nor stopped by this run")
        if not self._is_own_engine(cell):
            raise ControllerError(f"{cell} is no engine of model {self._model or 'policy'!r}")
        return cell

    async def _order(self, name: str, *arguments: Any) -> None:
        if self._orders is None:
            raise ControllerError(f"{name}: this controller has no way to the hub")
        try:
            await self._ask(getattr(self._orders, name), *arguments)
        except HubError as error:
            raise ControllerError(f"{name}: {error}") from error

    async def on_dispose(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """No engine gets traffic any more, and every later call raises Disposed."""
        await self.dispose()

    async def renew_window(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{window_id}: its owner lives. Raises WindowLost when it is not open any more."""
        self.state.on_renewed(params["window_id"], time.monotonic() + self._lease_s)

    async def end_update_weights(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{window_id, version, path, failed: {cell: reason}} -> {failed}. Each participant's label is looked at."""
        window_id, version, path = params["window_id"], int(params["version"]), str(params["path"])
        failed: dict[str, str] = dict(params.get("failed") or {})
        window = self.state.window.window if self.state.window is not None else None
        if window is not None and window.window_id == window_id:
            asked = [engine for engine in window.engines if engine.cell not in failed]
            for engine, found in zip(asked, await asyncio.gather(*map(self._label, asked)), strict=True):
                if found != version:
                    failed[engine.cell] = f"its label says {found}" if isinstance(found, int) else found
        self._apply(self.state.on_window_end(window_id, version, path, failed))
        self._keep_published()
        log.info("window %s: ended, weights %d are published, %d engines failed", window_id, version, len(failed))
        return {"failed": failed}

    async def _label(self, engine: EngineInfo) -> int | str:
        try:
            return await EngineApi(engine.url, self._http).weight_version(timeout_s=10.0)
        except EngineError as error:
            return str(error)

    async def abort_update_weights(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{window_id, reason}: engines continue, and get traffic again when they loaded the published weights."""
        self._apply(self.state.on_window_abort(params["window_id"]))
        log.error("window %s: aborted: %s", params["window_id"], params.get("reason", ""))

    async def set_published(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{version, path}: what is published already, from a driver that resumed."""
        self._apply(self.state.on_published(int(params["version"]), str(params["path"])))
        self._keep_published()

    def _keep_published(self) -> None:
        if self._published is not None and self.state.published is not None:
            self._published.write(self.state.published)

    async def abort_all(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """-> {cell: reason} of engines that did not; on all others every request has ended with what it has."""
        engines = [e.info for e in self.state.engines.values() if e.fit_for_window]
        outcomes = await asyncio.gather(
            *(EngineApi(engine.url, self._http).abort_all() for engine in engines), return_exceptions=True
        )
        return {e.cell: str(o) for e, o in zip(engines, outcomes, strict=True) if isinstance(o, BaseException)}

    async def check_weights(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """-> {cell: digest of all its tensors, or why there is none}: equal digests are equal weights."""
        engines = [e.info for e in self.state.engines.values() if e.state is decisions.EngineState.SERVING]
        return dict(zip([e.cell for e in engines], await asyncio.gather(*map(self._digest, engines)), strict=True))

    async def _digest(self, engine: EngineInfo) -> str:
        try:
            ranks = await EngineApi(engine.url, self._http).checksums()
        except EngineError as error:
            return f"error: {error}"
        sums = sorted((str(name), str(value)) for rank in ranks for name, value in rank["checksums"].items())
        return hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()

    async def get_status(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """-> ControllerStatus."""
        return msgspec.to_builtins(self.state.status())

    async def wait_serving(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{n, timeout_s} -> ControllerStatus, as soon as `n` engines serve; raises ServingTimeout."""
        wanted, timeout_s = int(params["n"]), float(params["timeout_s"])
        deadline = time.monotonic() + timeout_s
        try:
            while self.state.serving() < wanted:
                await self._wait_change(deadline, f"{self.state.serving()} of {wanted} engines serve")
        except asyncio.TimeoutError as error:
            states = ", ".join(f"{row.cell} {row.state}" for row in self.state.status().engines) or "none started"
            text = f"{self.state.serving()} of {wanted} engines serve after {timeout_s:g} s: {states}"
            raise ServingTimeout(text) from error
        return msgspec.to_builtins(self.state.status())
