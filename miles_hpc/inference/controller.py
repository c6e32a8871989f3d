"""The inference controller's decisions: which engine loads what, who may get traffic, and the weight window.

Data in, actions out. Nothing here opens, sleeps, logs or reads a clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from miles_hpc.inference.actions import Action, AwaitHealth, Forget, LoadWeights, Replace, Resume, SyncRouters
from miles_hpc.inference.engine_api import UNPUBLISHED
from miles_hpc.inference.windows import ControllerStatus, EngineInfo, EngineRow, Window, WindowLost
from miles_hpc.wire.ids import Generation

MAX_LOAD_FAILURES = 3


class EngineState(enum.Enum):
    """Life of one generation of an engine cell."""

    UNINITIALIZED = "uninitialized"  # in the address book, without an address to call
    INITIALIZING = "initializing"  # started, `/health` not 200 yet
    PENDING_WEIGHTS = "pending-weights"  # healthy, but not (or not yet by the router's word) fit for traffic
    SERVING = "serving"  # took the published weights, and every router lists it as healthy
    DISPOSED = "disposed"  # given up; the hub was asked to replace it


@dataclass(frozen=True)
class Published:
    """The weights that every engine is to serve. Without a path they are in no directory: an engine that lacks them
    waits for the next window."""

    version: int
    path: str


@dataclass
class Engine:
    """One generation of an engine cell."""

    info: EngineInfo
    state: EngineState = EngineState.UNINITIALIZED
    version: int = UNPUBLISHED
    activity: Literal["", "loading", "registering", "resuming"] = ""
    load_failures: int = 0
    reason: str = ""
    found: bool = False
    """It was there before this controller: what routers list of it stays listed until it is judged."""
    epoch: int = 0
    """Raised by everything after which an older look at its health says nothing."""

    @property
    def fit_for_window(self) -> bool:
        return self.state in (EngineState.PENDING_WEIGHTS, EngineState.SERVING)


@dataclass(frozen=True)
class Owner:
    """Who opened a window: a generation of a cell of this run."""

    cell: str
    generation: Generation


@dataclass
class OpenWindow:
    window: Window
    deadline: float
    owner: Owner | None = None
    lease_until: float = float("inf")


@dataclass
class Controller:
    """All engines of one model, its routers and its weight window.

    Args:
        updated: engines get traffic when they took published weights; otherwise they keep those they started with.
    """

    updated: bool = True
    engines: dict[str, Engine] = field(default_factory=dict)
    routers: dict[str, tuple[Generation, str]] = field(default_factory=dict)
    listed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Router cell -> urls that it lists as healthy, since its present generation."""
    published: Published | None = None
    window: OpenWindow | None = None
    begun: bool = False
    """An address book was seen."""
    living: dict[str, Generation] = field(default_factory=dict)
    """All cells of the address book."""
    window_wanted: bool = False
    """Someone waits for a window: no engine begins a load of its own that the window would wait for."""

    # ------------------------------------------------------------------------------------------ address book
    def on_engines(self, book: Iterable[EngineInfo]) -> list[Action]:
        """The address book's engines, all of them; an empty url says that there is no address."""
        found = {info.cell: info for info in book}
        actions: list[Action] = []
        before = self.wanted_urls()
        for cell, engine in list(self.engines.items()):
            info = found.get(cell)
            if info is None or info.generation != engine.info.generation:
                del self.engines[cell]
                actions.append(Forget(engine.info))
        for cell, info in found.items():
            engine = self.engines.setdefault(cell, Engine(info, found=not self.begun))
            if engine.state is EngineState.UNINITIALIZED and info.url:
                engine.info, engine.state = info, EngineState.INITIALIZING
                actions.append(AwaitHealth(info))
        self.begun = True
        return actions + self._sync_if_changed(before)

    def on_cells(self, living: Mapping[str, Generation]) -> tuple[list[Action], str]:
        """All cells of the address book: a window whose owner is gone is aborted; its id, or an empty text."""
        self.living = dict(living)
        owner = None if self.window is None else self.window.owner
        if owner is None or living.get(owner.cell) == owner.generation:
            return [], ""
        return self._abort_open()

    def on_routers(self, routers: Mapping[str, tuple[Generation, str]]) -> list[Action]:
        """The address book's routers: cell -> (generation, url). A new generation lists nobody."""
        if routers == self.routers:
            return []
        self.listed = {c: urls for c, urls in self.listed.items() if routers.get(c) == self.routers.get(c)}
        self.routers = dict(routers)
        return [SyncRouters()]

    def on_router_list(self, router: str, generation: Generation, healthy: Iterable[str]) -> None:
        """What a router lists as healthy, as seen after it was brought in line."""
        if self.routers.get(router, (None, ""))[0] != generation:
            return
        self.listed[router] = frozenset(healthy)
        for engine in self.engines.values():
            if engine.activity == "registering" and self._listed_everywhere(engine.info.url):
                engine.activity, engine.state = "", EngineState.SERVING

    # -------------------------------------------------------------------------------------- engines' outcomes
    def on_healthy(self, info: EngineInfo, version: int, *, paused: bool = False) -> list[Action]:
        """`/health` is 200, and the label says `version`; a paused one was left so by a window that is over."""
        engine = self._find(info)
        if engine is None or engine.state is not EngineState.INITIALIZING:
            return []
        # A router may still list what was not judged until now.
        sync: list[Action] = [SyncRouters()] if engine.found else []
        engine.state, engine.version, engine.found = EngineState.PENDING_WEIGHTS, version, False
        if paused and self.window is None:
            engine.activity = "resuming"
            return [Resume(info), *sync]
        return [*self._advance(), *sync]

    def on_loaded(self, info: EngineInfo, version: int) -> list[Action]:
        """The engine took `version`."""
        engine = self._find(info)
        if engine is None or engine.activity != "loading":
            return []
        engine.activity, engine.version, engine.load_failures = "", version, 0
        engine.epoch += 1
        return self._advance()

    def on_load_failed(self, info: EngineInfo, reason: str) -> list[Action]:
        """The engine did not take the weights: tried again, replaced after `MAX_LOAD_FAILURES`."""
        engine = self._find(info)
        if engine is None or engine.activity != "loading":
            return []
        engine.activity, engine.version = "", UNPUBLISHED
        engine.load_failures += 1
        if engine.load_failures >= MAX_LOAD_FAILURES:
            return self._dispose(engine, f"weights were not taken {engine.load_failures} times: {reason}")
        return self._advance()

    def on_resumed(self, info: EngineInfo, version: int = UNPUBLISHED) -> list[Action]:
        """The engine generates again, with the weights `version`; by default it is not known with which."""
        engine = self._find(info)
        if engine is None or engine.activity != "resuming":
            return []
        engine.activity, engine.version = "", version
        engine.epoch += 1
        return self._advance()

    def watched(self, info: EngineInfo) -> int | None:
        """The epoch to look at an engine's health in; None while nothing that is seen would be acted on."""
        engine = self._find(info)
        if engine is None or not engine.fit_for_window or self.window is not None:
            return None
        return None if engine.activity in ("loading", "resuming") else engine.epoch

    def on_stalled(self, info: EngineInfo, epoch: int, reason: str) -> list[Action]:
        """Several looks in `epoch` found no sign of life; a verdict that spans a window or a load is thrown away."""
        engine = self._find(info)
        if engine is None or self.watched(info) != epoch:
            return []
        return self._dispose(engine, reason)

    def on_failed(self, info: EngineInfo, reason: str) -> list[Action]:
        """The engine is of no use: replaced."""
        engine = self._find(info)
        return [] if engine is None else self._dispose(engine, reason)

    # --------------------------------------------------------------------------------------- published weights
    def on_published(self, version: int, path: str) -> list[Action]:
        """The newest published weights, as their publisher names them; older news change nothing.

        The same version again says where it lies now.
        """
        if self.published is not None:
            known = self.published
            if version < known.version or (version == known.version and (known.path or not path)):
                return []
        self.published = Published(version, path)
        return self._advance()

    # -------------------------------------------------------------------------------------------------- window
    def window_obstacle(self, wanted: int) -> str:
        """Why no window can begin now; empty when one can."""
        if self.window is not None:
            return f"window {self.window.window.window_id} is open"
        busy = sorted(e.info.cell for e in self.engines.values() if e.activity in ("loading", "resuming"))
        if busy:
            return f"{', '.join(busy)} still change weights by themselves"
        fit = sum(engine.fit_for_window for engine in self.engines.values())
        if fit < wanted:
            states = ", ".join(f"{c} {e.state.value}" for c, e in sorted(self.engines.items())) or "none started"
            return f"{fit} of {wanted} engines are ready ({states})"
        return ""

    def open_window(
        self,
        window_id: str,
        wanted: int,
        deadline: float,
        owner: Owner | None = None,
        lease_until: float = float("inf"),
    ) -> Window:
        """Snapshot the engines. `deadline` and `lease_until` are on the clock of `on_tick`.

        Raises:
            ValueError: when `window_obstacle` says that none can begin.
        """
        obstacle = self.window_obstacle(wanted)
        if obstacle:
            raise ValueError(obstacle)
        engines = [engine.info for engine in self.engines.values() if engine.fit_for_window]
        window = Window(window_id=window_id, engines=sorted(engines, key=lambda e: (e.gpu_offset, e.cell)))
        # One that is in no address book, such as a trainer of someone else's, is known by its lease alone.
        listed = owner is not None and self.living.get(owner.cell) == owner.generation
        self.window = OpenWindow(window, deadline, owner if listed else None, lease_until)
        self._new_epoch(window)
        return window

    def on_renewed(self, window_id: str, lease_until: float) -> None:
        """The owner lives. Raises WindowLost when another or no window is open."""
        self._take(window_id)
        assert self.window is not None
        self.window.lease_until = lease_until

    def on_window_end(self, window_id: str, version: int, path: str, failed: Mapping[str, str]) -> list[Action]:
        """All participants took `version`, except those in `failed` (cell -> reason), which are replaced.

        Raises:
            WindowLost: when another or no window is open.
            ValueError: when `version` is older than the published one, or is that one from another directory.
        """
        window = self._take(window_id)
        # The same weights again: the controller before this one published them and was lost before its answer.
        again = self.published == Published(version, path)
        if self.published is not None and version <= self.published.version and not again:
            raise ValueError(f"weight version {version} is not above the published {self.published.version}")
        self.window, self.published = None, Published(version, path)
        self._new_epoch(window)
        actions: list[Action] = []
        for info in window.engines:
            engine = self._find(info)
            if engine is None or engine.state is EngineState.DISPOSED:
                continue
            if info.cell in failed:
                actions += self._dispose(engine, f"weights {version}: {failed[info.cell]}")
            else:
                engine.version = version
        return actions + self._advance()

    def on_window_abort(self, window_id: str) -> list[Action]:
        """The participants may be paused and hold either weights: no traffic until they loaded the published ones.

        Raises:
            WindowLost: when another or no window is open.
        """
        window = self._take(window_id)
        before, self.window = self.wanted_urls(), None
        self._new_epoch(window)
        actions: list[Action] = []
        for info in window.engines:
            engine = self._find(info)
            if engine is not None and engine.fit_for_window:
                engine.state, engine.activity = EngineState.PENDING_WEIGHTS, "resuming"
                actions.append(Resume(info))
        return actions + self._sync_if_changed(before)

    def on_tick(self, now: float) -> tuple[list[Action], str]:
        """Actions, and the id of a window whose deadline or lease is over (empty: none)."""
        if self.window is None or now < min(self.window.deadline, self.window.lease_until):
            return self._advance(), ""
        return self._abort_open()

    def dispose(self) -> tuple[list[Action], str]:
        """Nothing gets traffic any more; also the id of the window that this aborted (empty: none)."""
        actions, window_id = self._abort_open() if self.window is not None else ([], "")
        for engine in self.engines.values():
            engine.state, engine.activity, engine.reason = EngineState.DISPOSED, "", "the controller was disposed of"
        return [*actions, SyncRouters()], window_id

    def _abort_open(self) -> tuple[list[Action], str]:
        assert self.window is not None
        window_id = self.window.window.window_id
        return self.on_window_abort(window_id), window_id

    def _new_epoch(self, window: Window) -> None:
        for info in window.engines:
            engine = self._find(info)
            if engine is not None:
                engine.epoch += 1

    # ------------------------------------------------------------------------------------------------ answers
    def wanted_urls(self) -> set[str]:
        """What every router is to list, and nothing else."""
        return {
            e.info.url
            for e in self.engines.values()
            if e.state is EngineState.SERVING or (e.activity == "registering" and e.state is not EngineState.DISPOSED)
        }

    def kept_urls(self) -> set[str]:
        """What a router may list besides: engines from before this controller that it has not judged yet."""
        return {e.info.url for e in self.engines.values() if e.found and e.state is EngineState.INITIALIZING}

    def is_fit(self, info: EngineInfo) -> bool:
        """Whether this generation of an engine could take part in a window."""
        engine = self._find(info)
        return engine is not None and engine.fit_for_window

    def serving(self) -> int:
        """Engines that get traffic."""
        return sum(engine.state is EngineState.SERVING for engine in self.engines.values())

    def status(self) -> ControllerStatus:
        """For people and for the driver."""
        rows = [
            EngineRow(
                cell=cell,
                generation=e.info.generation,
                url=e.info.url,
                state=e.state.value,
                weight_version=e.version,
                reason=e.reason or e.activity,
            )
            for cell, e in sorted(self.engines.items())
        ]
        return ControllerStatus(
            engines=rows,
            published=0 if self.published is None else self.published.version,
            path="" if self.published is None else self.published.path,
            window="" if self.window is None else self.window.window.window_id,
            routers=[url for _, url in self.routers.values()],
        )

    # ----------------------------------------------------------------------------------------------- internals
    def _find(self, info: EngineInfo) -> Engine | None:
        engine = self.engines.get(info.cell)
        return engine if engine is not None and engine.info.generation == info.generation else None

    def _take(self, window_id: str) -> Window:
        if self.window is None or self.window.window.window_id != window_id:
            now = "none is open" if self.window is None else f"{self.window.window.window_id} is open"
            raise WindowLost(f"weight window {window_id} is over ({now}): it was ended, aborted or timed out")
        return self.window.window

    def _listed_everywhere(self, url: str) -> bool:
        return bool(self.routers) and all(url in self.listed.get(router, ()) for router in self.routers)

    def _sync_if_changed(self, before: set[str]) -> list[Action]:
        wanted = self.wanted_urls()
        if wanted == before:
            return []
        # A healed engine may come back at the same url: what was said about the old one says nothing about it.
        self.listed = {router: urls - (before - wanted) for router, urls in self.listed.items()}
        return [SyncRouters()]

    def _dispose(self, engine: Engine, reason: str) -> list[Action]:
        if engine.state is EngineState.DISPOSED:
            return []
        before = self.wanted_urls()
        engine.state, engine.activity, engine.reason = EngineState.DISPOSED, "", reason
        return [*self._sync_if_changed(before), Forget(engine.info), Replace(engine.info, reason)]

    def _advance(self) -> list[Action]:
        """The next step of every idle engine, given what is published."""
        published = self.published
        if published is None and self.updated:
            return []
        before = self.wanted_urls()
        actions: list[Action] = []
        for engine in self.engines.values():
            current = published is None or engine.version == published.version
            in_traffic = engine.state is EngineState.SERVING or engine.activity == "registering"
            if in_traffic and not current and self.window is None:
                engine.state, engine.activity = EngineState.PENDING_WEIGHTS, ""
            if engine.state is not EngineState.PENDING_WEIGHTS or engine.activity:
                continue
            if current:
                engine.activity = "registering"
            elif published is not None and published.path and self.window is None and not self.window_wanted:
                engine.activity = "loading"
                engine.epoch += 1
                actions.append(LoadWeights(engine.info, published.version, published.path))
        return self._sync_if_changed(before) + actions
