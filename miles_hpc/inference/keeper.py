"""The controller's hands: carry out for one model what `Controller` decides, and tell it how that went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
import msgspec

from miles_hpc.inference import controller as decisions
from miles_hpc.inference import health
from miles_hpc.inference.actions import Action, AwaitHealth, Forget, LoadWeights, Replace, Resume, SyncRouters
from miles_hpc.inference.book import engines_in, routers_in
from miles_hpc.inference.engine_api import (
    UNPUBLISHED,
    EngineApi,
    EngineError,
    EngineRefused,
    EngineTooOld,
    EngineUnreachable,
)
from miles_hpc.inference.published import PublishedFile
from miles_hpc.inference.router_api import RouterApi, RouterError, RouterTooOld
from miles_hpc.inference.weights import load_from_disk, verify_label
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.time_limit import within

log = logging.getLogger(__name__)

_HEALTH_POLL_S, _PATIENT_POLL_S, _EAGER_S = 0.1, 0.5, 20.0
_REGISTER_POLL_S = 0.05
_OTHERS_S = 1.0
_FAILURE_PAUSE_S = 1.0
_PROGRESS_S = 10.0
_HOLD_EVERY_S = 5.0
_LET_GO_S = 3.0
READMIT_S = 5.0
"""Until an external engine that was given up is looked at again."""


class EngineKeeper:
    """Runs `Controller` against real engines and routers.

    Args:
        http: the caller's client, not closed here.
        replace: tells the hub that a generation of a cell is of no use.
        engines_wanted: how many engines a weight window waits for.
        start_deadline_s: until a new engine must be healthy.
        window_timeout_s: longest window; then it is aborted.
        reconcile_s: between two looks at a router's list.
        worker_key: the key that an engine asks for, by its url; given to the routers.
        lease_s: a window whose owner says nothing for this long is aborted.
        stall_s: an engine that gives no sign of progress for about this long is replaced.
        hold: asks the hub to stop none of these generations for an operator for some seconds; 0 ends it.
        published: where it is kept what is published, for a controller that comes after this one.
        model: name of the model whose engines and routers are kept; empty: all that there are.
        updated: see `Controller`.
        external: engines that are in no address book, and are never replaced.
        give_up: called with the reason when nothing can be kept, such as a router that is too old.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        replace: Callable[[str, Generation, str], None],
        *,
        engines_wanted: int,
        start_deadline_s: float,
        window_timeout_s: float,
        reconcile_s: float = 2.0,
        load_timeout_s: float = 600.0,
        worker_key: Callable[[str], str] = lambda url: "",
        lease_s: float = 30.0,
        stall_s: float = 45.0,
        published: PublishedFile | None = None,
        hold: Callable[[dict[str, Generation], float], None] = lambda cells, seconds: None,
        model: str = "",
        updated: bool = True,
        external: Sequence[EngineInfo] = (),
        give_up: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.state = decisions.Controller(updated=updated)
        self._model = model
        self._external = {engine.cell: engine for engine in external}
        self._book: list[EngineInfo] = []
        self._give_up = give_up
        self._http = http
        self._replace = replace
        self._engines_wanted = engines_wanted
        self._start_deadline_s = start_deadline_s
        self._window_timeout_s = window_timeout_s
        self._reconcile_s = reconcile_s
        self._load_timeout_s = load_timeout_s
        self._worker_key = worker_key
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._published = published
        self._hold = hold
        self._held_at = 0.0
        known = published.read() if published is not None else None
        if known is not None:
            log.info("weights %d are published in %s, by the word of an earlier controller", known.version, known.path)
            self.state.published = known
        self._tasks: dict[tuple[str, Generation], set[asyncio.Task[None]]] = {}
        self._router_tasks: dict[str, tuple[Generation, asyncio.Task[None]]] = {}
        self._kicks: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._turns: list[object] = []
        """Who waits for a weight window; the first has its turn."""
        self._disposed = False
        self._said_at = float("-inf")

    # ------------------------------------------------------------------------------------------------- running
    async def run(self, tick_s: float = 1.0) -> None:
        """Tick until cancelled; then cancel everything that runs, and wait for it."""
        try:
            while True:
                actions, aborted = self.state.on_tick(time.monotonic())
                if aborted:
                    log.error(
                        "window %s: aborted: not ended within %g s, or its owner was silent for %g s",
                        aborted,
                        self._window_timeout_s,
                        self._lease_s,
                    )
                self._apply(actions)
                self._keep_hold()
                await asyncio.sleep(tick_s)
        finally:
            running = [t for tasks in self._tasks.values() for t in tasks]
            running += [t for _, t in self._router_tasks.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self.state.window is not None:
                await self._let_external_go()

    def _keep_hold(self) -> None:
        """Say while a window lasts, to each hub that may have come up since, which engines take part."""
        window, now = self.state.window, time.monotonic()
        if window is None:
            if self._held_at:
                self._held_at = 0.0
                self._hold({}, 0.0)
        elif now - self._held_at >= _HOLD_EVERY_S:
            self._held_at = now
            self._hold({engine.cell: engine.generation for engine in window.window.engines}, 4 * _HOLD_EVERY_S)

    def on_pools(self, pools: Mapping[str, Sequence[CellAddrs]]) -> None:
        """The address book changed. Called on the loop's thread."""
        living = {cell.cell: cell.generation for cells in pools.values() for cell in cells}
        actions, aborted = self.state.on_cells(living)
        if aborted:
            log.error("window %s: aborted: its owner is gone", aborted)
        self._book = engines_in(pools, self._model)
        self._apply(actions + self.state.on_routers(routers_in(pools, self._model)) + self._see_engines())

    def _see_engines(self) -> list[Action]:
        if self._disposed:
            return []  # one that the hub heals meanwhile would be a new engine, and get traffic
        return self.state.on_engines([*self._book, *self._external.values()])

    def _readmit(self, cell: str) -> None:
        """Look anew at an external engine that was given up: it may have been started again, or have come to itself."""
        if self._disposed:
            return
        known = self._external[cell]
        generation = Generation(known.generation.epoch, known.generation.n + 1)
        self._external[cell] = msgspec.structs.replace(known, generation=generation)
        self._apply(self._see_engines())

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AwaitHealth):
                self._spawn(action.engine, self._await_health(action.engine))
            elif isinstance(action, LoadWeights):
                self._spawn(action.engine, self._load(action.engine, action.version, action.path))
            elif isinstance(action, Resume):
                self._spawn(action.engine, self._resume(action.engine))
            elif isinstance(action, SyncRouters):
                self._sync_routers()
            elif isinstance(action, Replace):
                cell, generation = action.engine.cell, action.engine.generation
                if cell in self._external:
                    log.error("%s at %s gets no traffic: %s", cell, action.engine.url, action.reason)
                    asyncio.get_running_loop().call_later(READMIT_S, self._readmit, cell)
                else:
                    log.error("%s g%s is replaced: %s", cell, generation, action.reason)
                    self._replace(cell, generation, action.reason)
            elif isinstance(action, Forget):
                for task in self._tasks.pop((action.engine.cell, action.engine.generation), set()):
                    task.cancel()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, engine: EngineInfo, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # a defect here must not leave an engine waiting for ever
                log.exception("%s: the controller failed on it", engine.cell)
                self._apply(self.state.on_failed(engine, f"{type(error).__name__}: {error}"))

        key = (engine.cell, engine.generation)
        task = asyncio.ensure_future(guarded())
        self._tasks.setdefault(key, set()).add(task)
        task.add_done_callback(lambda done: self._tasks.get(key, set()).discard(done))

    # ------------------------------------------------------------------------------------------------- engines
    async def _await_health(self, engine: EngineInfo) -> None:
        api = EngineApi(engine.url, self._http)
        started = time.monotonic()
        reported = started
        while True:
            if await api.health():
                with contextlib.suppress(EngineError):
                    if missing := await api.missing_calls():
                        self._give_up(EngineTooOld(engine.url, missing))
                        return
                    if engine.cell in self._external:
                        # It may have been given up for a scheduler that stands still behind a living server.
                        await api.server_info(timeout_s=health.patience_s(self._stall_s))
                    version = await api.weight_version(timeout_s=5.0)
                    paused = await api.paused()
                    waited = time.monotonic() - started
                    log.info("%s g%s: healthy after %.1f s", engine.cell, engine.generation, waited)
                    self._apply(self.state.on_healthy(engine, version, paused=paused))
                    self._spawn(engine, self._watch(engine))
                    if engine.cell in self._external:
                        self._spawn(engine, self._watch_for_others(engine))
                    return
            now = time.monotonic()
            if now - started >= self._start_deadline_s:
                reason = f"{engine.url}/health did not answer 200 within {self._start_deadline_s:g} s"
                self._apply(self.state.on_failed(engine, reason))
                return
            if now - reported >= _PROGRESS_S:
                reported = now
                log.info("%s: not healthy yet after %.0f s", engine.cell, now - started)
            await asyncio.sleep(_HEALTH_POLL_S if now - started < _EAGER_S else _PATIENT_POLL_S)

    async def dispose(self) -> None:
        """End the window if one is open, let external engines generate again, and take all out of the routers."""
        self._disposed = True
        actions, window_id = self.state.dispose()
        self._apply([action for action in actions if isinstance(action, SyncRouters)])
        if window_id:
            log.warning("window %s: aborted: the controller is disposed of", window_id)
            self._keep_hold()
            await self._let_external_go()

    async def _let_external_go(self) -> None:
        """Nobody of this run will ever continue what a window has paused, and nobody stops it."""

        async def resume(engine: EngineInfo) -> None:
            with contextlib.suppress(EngineError):
                await EngineApi(engine.url, self._http, timeout_s=_LET_GO_S).resume()

        await asyncio.gather(*(resume(engine) for engine in self._external.values()))

    async def _load(self, engine: EngineInfo, version: int, path: str) -> None:
        try:
            await load_from_disk(EngineApi(engine.url, self._http), path, version, timeout_s=self._load_timeout_s)
        except (EngineError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {self._load_timeout_s:g} s"
            log.warning("%s: weights %d from %s were not taken: %s", engine.cell, version, path, reason)
            await asyncio.sleep(_FAILURE_PAUSE_S)
            self._apply(self.state.on_load_failed(engine, reason))
            return
        log.info("%s g%s: took weights %d", engine.cell, engine.generation, version)
        self._apply(self.state.on_loaded(engine, version))

    async def _watch(self, engine: EngineInfo) -> None:
        """Look at an engine's progress for as long as it lives."""
        api = EngineApi(engine.url, self._http)
        progress = health.Progress(epoch=-1)
        while True:
            await asyncio.sleep(health.interval_s(self._stall_s))
            epoch = self.state.watched(engine)
            if epoch is None:
                continue
            if epoch != progress.epoch:
                progress = health.Progress(epoch)
            seen = await health.look(api, progress.stamp, health.patience_s(self._stall_s))
            if seen.trouble:
                log.warning("%s g%s: %s", engine.cell, engine.generation, seen.trouble)
            reason = progress.on_look(seen)
            if reason:
                self._apply(self.state.on_stalled(engine, epoch, reason))

    async def _watch_for_others(self, engine: EngineInfo) -> None:
        """See an external engine end, or begin anew, at once: no agent and no generation of its cell tells of that."""
        api = EngineApi(engine.url, self._http, timeout_s=health.patience_s(self._stall_s))
        while True:
            await asyncio.sleep(min(_OTHERS_S, health.interval_s(self._stall_s)))
            epoch = self.state.watched(engine)
            if epoch is None:
                continue
            found: int | None = None
            try:
                found = await api.weight_version()
            except EngineUnreachable as error:
                if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    self._apply(self.state.on_stalled(engine, epoch, str(error)))
            except EngineError as error:
                log.warning("%s: %s", engine.cell, error)
            wanted = self.state.engines[engine.cell].version
            if found is not None and found != wanted:
                reason = f"its weights are {found} and should be {wanted}: somebody started or changed it"
                self._apply(self.state.on_stalled(engine, epoch, reason))

    async def _resume(self, engine: EngineInfo) -> None:
        """Bring the published weights back, then continue: what waits in the engine must meet no others.

        An engine that hangs in a broadcast shows here by its silence.
        """
        api, published, version = EngineApi(engine.url, self._http), self.state.published, UNPUBLISHED
        try:
            await api.server_info(timeout_s=health.patience_s(self._stall_s))
            await self._end_session(api)
            if published is not None and published.path:
                await load_from_disk(api, published.path, published.version, timeout_s=self._load_timeout_s)
                version = published.version
            else:
                await api.abort_all()
                # The old label would say of weights that may be half written that they are the published ones.
                await api.update_weight_version(UNPUBLISHED)
            await api.resume()
            if await self._end_session(api):
                raise EngineError(f"{engine.url}: somebody still sends it weights")
            # A sender that ended its session itself meanwhile has left its own label, over parts of two weights.
            await verify_label(api, version)
        except (EngineError, asyncio.TimeoutError) as error:
            reason = f"did not continue after an aborted weight window: {error or 'no answer in time'}"
            self._apply(self.state.on_failed(engine, reason))
            return
        self._apply(self.state.on_resumed(engine, version))

    async def _end_session(self, api: EngineApi) -> bool:
        """End the session of updates that a window's owner may have left, or still uses: the engine takes nothing more
        from it. Whether there was one."""
        try:
            await api.end_update()
        except EngineRefused:
            return False
        return True

    # ------------------------------------------------------------------------------------------------- routers
    def _sync_routers(self) -> None:
        for cell, (generation, task) in list(self._router_tasks.items()):
            if self.state.routers.get(cell, (None, ""))[0] != generation:
                task.cancel()
                del self._router_tasks[cell]
        for cell, (generation, url) in self.state.routers.items():
            if cell not in self._router_tasks:
                self._kicks[cell] = asyncio.Event()
                task = asyncio.ensure_future(self._keep_router(cell, generation, url))
                self._router_tasks[cell] = (generation, task)
            self._kicks[cell].set()

    async def _keep_router(self, cell: str, generation: Generation, url: str) -> None:
        """Bring one router's list in line whenever something changed, and every `reconcile_s` in any case."""
        kick, silent_since, reported = self._kicks[cell], time.monotonic(), time.monotonic()
        api = RouterApi(url, self._http, timeout_s=5.0, worker_key=self._worker_key)
        while True:
            kick.clear()
            pause = self._reconcile_s
            try:
                healthy = await self._bring_in_line(api)
                silent_since = time.monotonic()
                before = self.state.serving()
                self.state.on_router_list(cell, generation, healthy)
                if self.state.serving() != before:
                    log.info("router %s: %d engines serve", cell, self.state.serving())
                    self._notify()
                if not self.state.wanted_urls() <= healthy:
                    pause = _REGISTER_POLL_S
            except RouterTooOld as error:
                self._give_up(error)
                return
            except RouterError as error:
                # A starting router refuses connections for about a second.
                pause = 0.2
                now = time.monotonic()
                if now - silent_since >= _PROGRESS_S and now - reported >= _PROGRESS_S:
                    reported = now
                    log.warning("router %s: no answer for %.0f s: %s", cell, now - silent_since, error)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(pause, kick.wait())

    async def _bring_in_line(self, router: RouterApi) -> set[str]:
        """Remove and add until the list fits; returns the urls that it then had as healthy."""
        listed = await router.workers()
        extra = {worker.url for worker in listed} - self.state.wanted_urls() - self.state.kept_urls()
        for url in sorted(extra):
            log.info("router %s: removes %s", router.url, url)
            await router.remove(url)
        # Asked again: while a removal was awaited, another engine may have been lost.
        for url in sorted(self.state.wanted_urls() - {worker.url for worker in listed}):
            log.info("router %s: adds %s", router.url, url)
            await router.add(url)
        return {worker.url for worker in listed if worker.healthy} - extra

    async def _wait_change(self, deadline: float, what: str, patience_s: float = float("inf")) -> None:
        """Until the state changed, for `patience_s` at most. Raises TimeoutError at `deadline`."""
        changed, until = self._changed, min(deadline, time.monotonic() + patience_s)
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise asyncio.TimeoutError
            if now >= until:
                return
            try:
                await within(min(until - now, _PROGRESS_S), changed.wait())
                return
            except asyncio.TimeoutError:
                if now - self._said_at >= _PROGRESS_S - 1.0:
                    self._said_at = now
                    log.info("waiting: %s", what)
