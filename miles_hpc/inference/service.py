"""The controller's hands: carries out what `Controller` decides, and tells it how that went."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from miles_hpc.inference import controller as decisions
from miles_hpc.inference import health
from miles_hpc.inference.book import engines_in, routers_in
from miles_hpc.inference.engine_api import UNPUBLISHED, EngineApi, EngineError, EngineRefused
from miles_hpc.inference.published import PublishedFile
from miles_hpc.inference.router_api import RouterApi, RouterError
from miles_hpc.inference.weights import load_from_disk
from miles_hpc.inference.windows import EngineInfo, ServingTimeout, WindowTimeout
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.messages import CellAddrs

log = logging.getLogger(__name__)

_HEALTH_POLL_S = 0.1
_REGISTER_POLL_S = 0.05
_FAILURE_PAUSE_S = 1.0
_PROGRESS_S = 10.0
_HOLD_EVERY_S = 5.0


def _owner(named: Any) -> decisions.Owner | None:
    return decisions.Owner(str(named[0]), Generation.parse(named[1])) if named else None


class ControllerService:
    """Runs `Controller` against real engines and routers.

    Args:
        http: the caller's client, not closed here.
        replace: tells the hub that a generation of a cell is of no use.
        engines_wanted: how many engines a weight window waits for.
        start_deadline_s: until a new engine must be healthy.
        window_timeout_s: longest window; then it is aborted.
        reconcile_s: between two looks at a router's list.
        worker_key: the key that engines ask for, given to the routers.
        lease_s: a window whose owner says nothing for this long is aborted.
        stall_s: an engine that gives no sign of progress for about this long is replaced.
        hold: asks the hub to stop none of these generations for an operator for some seconds; 0 ends it.
        published: where it is kept what is published, for a controller that comes after this one.
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
        worker_key: str = "",
        lease_s: float = 30.0,
        stall_s: float = 45.0,
        published: PublishedFile | None = None,
        hold: Callable[[dict[str, Generation], float], None] = lambda cells, seconds: None,
    ) -> None:
        self.state = decisions.Controller()
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
        self._window_turn = asyncio.Lock()

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
        self._apply(actions + self.state.on_routers(routers_in(pools)) + self.state.on_engines(engines_in(pools)))

    def _apply(self, actions: list[decisions.Action]) -> None:
        for action in actions:
            if isinstance(action, decisions.AwaitHealth):
                self._spawn(action.engine, self._await_health(action.engine))
            elif isinstance(action, decisions.LoadWeights):
                self._spawn(action.engine, self._load(action.engine, action.version, action.path))
            elif isinstance(action, decisions.Resume):
                self._spawn(action.engine, self._resume(action.engine))
            elif isinstance(action, decisions.SyncRouters):
                self._sync_routers()
            elif isinstance(action, decisions.Replace):
                log.error("%s g%s is replaced: %s", action.engine.cell, action.engine.generation, action.reason)
                self._replace(action.engine.cell, action.engine.generation, action.reason)
            elif isinstance(action, decisions.Forget):
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
                    version = await api.weight_version(timeout_s=5.0)
                    paused = await api.paused()
                    waited = time.monotonic() - started
                    log.info("%s g%s: healthy after %.1f s", engine.cell, engine.generation, waited)
                    self._apply(self.state.on_healthy(engine, version, paused=paused))
                    self._spawn(engine, self._watch(engine))
                    return
            now = time.monotonic()
            if now - started >= self._start_deadline_s:
                reason = f"{engine.url}/health did not answer 200 within {self._start_deadline_s:g} s"
                self._apply(self.state.on_failed(engine, reason))
                return
            if now - reported >= _PROGRESS_S:
                reported = now
                log.info("%s: not healthy yet after %.0f s", engine.cell, now - started)
            await asyncio.sleep(_HEALTH_POLL_S)

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

    async def _resume(self, engine: EngineInfo) -> None:
        """Bring the published weights back, then continue: what waits in the engine must meet no others.

        An engine that hangs in a broadcast shows here by its silence.
        """
        api, published, version = EngineApi(engine.url, self._http), self.state.published, UNPUBLISHED
        try:
            await api.server_info(timeout_s=health.patience_s(self._stall_s))
            with contextlib.suppress(EngineRefused):
                await api.end_update()  # the window's owner may have left a session open
            if published is not None and published.path:
                await load_from_disk(api, published.path, published.version, timeout_s=self._load_timeout_s)
                version = published.version
            else:
                await api.abort_all()
            await api.resume()
        except (EngineError, asyncio.TimeoutError) as error:
            reason = f"did not continue after an aborted weight window: {error or 'no answer in time'}"
            self._apply(self.state.on_failed(engine, reason))
            return
        self._apply(self.state.on_resumed(engine, version))

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
            except RouterError as error:
                # A starting router refuses connections for about a second.
                pause = 0.2
                now = time.monotonic()
                if now - silent_since >= _PROGRESS_S and now - reported >= _PROGRESS_S:
                    reported = now
                    log.warning("router %s: no answer for %.0f s: %s", cell, now - silent_since, error)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(kick.wait(), pause)

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

    # --------------------------------------------------------------------------------------------- remote calls
    def methods(self) -> dict[str, Callable[[dict[str, Any], list[memoryview]], Awaitable[Any]]]:
        """Handlers for `RpcServer`."""
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
        }

    async def start_update_weights(self, params: dict[str, Any], frames: list[memoryview]) -> Any:
        """{timeout_s, engines?, owner?: [cell, generation]} -> Window. Waits its turn, and for `engines` (default: all)
        to be ready. A window with an owner is aborted when the owner leaves the address book, or does not renew it.

        Raises:
            WindowTimeout: at the deadline, with what was still missing.
        """
        timeout_s, wanted = float(params["timeout_s"]), int(params.get("engines", self._engines_wanted))
        deadline = time.monotonic() + timeout_s
        obstacle = "another caller waits for a window"
        try:
            await asyncio.wait_for(self._window_turn.acquire(), timeout_s)
            try:
                self.state.window_wanted = True
                while obstacle := self.state.window_obstacle(wanted):
                    await self._wait_change(deadline, f"weight window: {obstacle}")
                now = time.monotonic()
                owner = _owner(params.get("owner"))
                lease = now + self._lease_s if owner is not None else float("inf")
                window_id = uuid.uuid4().hex[:12]
                window = self.state.open_window(window_id, wanted, now + self._window_timeout_s, owner, lease)
            finally:
                self.state.window_wanted = False
                self._window_turn.release()
        except asyncio.TimeoutError as error:
            raise WindowTimeout(f"no weight window within {timeout_s:g} s: {obstacle}") from error
        self._keep_hold()
        log.info("window %s: begins with %d engines", window.window_id, len(window.engines))
        return msgspec.to_builtins(window)

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

    async def _wait_change(self, deadline: float, what: str) -> None:
        """Until the state changed; a progress line every 10 s. Raises TimeoutError at `deadline`."""
        changed = self._changed
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise asyncio.TimeoutError
            try:
                await asyncio.wait_for(changed.wait(), min(left, _PROGRESS_S))
                return
            except asyncio.TimeoutError:
                log.info("waiting: %s", what)
