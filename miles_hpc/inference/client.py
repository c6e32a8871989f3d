"""The controller's callers: driver, trainer rank 0, and whoever publishes weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from miles_hpc.inference.windows import (
    CONTROLLER_POOL,
    RPC_PORT,
    ControllerError,
    ControllerStatus,
    Disposed,
    EngineRow,
    ServingTimeout,
    Window,
    WindowLost,
    WindowTimeout,
)
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import cell_of
from miles_hpc.wire.messages import CellAddrs
from miles_hpc.wire.rpc import RpcClient, RpcError, RpcRemoteError
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)

_CALL_S = 30.0
_CHECK_S = 90.0
_RENEW_S = 5.0
_ANSWER_MARGIN_S = 10.0
_ERRORS = {error.__name__: error for error in (WindowTimeout, WindowLost, ServingTimeout, Disposed, ControllerError)}


class AddressBook(Protocol):
    """What is used of a HubClient."""

    @property
    def env(self) -> WorkerEnv: ...

    @property
    def pools(self) -> Mapping[str, Sequence[CellAddrs]]: ...


def controller_address(book: AddressBook) -> HostAndPort | None:
    """Where the controller listens, or None while it is not in the address book."""
    cells = book.pools.get(CONTROLLER_POOL) or []
    return cells[0].workers[0].get(RPC_PORT) if cells and cells[0].workers else None


class ControllerClient:
    """Calls to the controller that the address book names; close it on the loop that used it.

    Besides its own errors each call raises RpcTimeout or RpcUnreachable.

    Args:
        hub: the program's HubClient.
        model: the model that is meant; empty: the policy.
    """

    def __init__(self, hub: AddressBook, model: str = "") -> None:
        self._model = model
        self._rpc = RpcClient(lambda: controller_address(hub), hub.env.run_dir, hub.env.attempt)
        self._owner = [cell_of(hub.env.worker), str(hub.env.generation)]
        self._renewals: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def at(
        cls, address: Callable[[], HostAndPort | None], run_dir: Path, attempt: int, model: str = ""
    ) -> ControllerClient:
        """A client without an address book. Nobody notices its end: a window that it leaves ends at its deadline."""
        client = cls.__new__(cls)
        client._model = model
        client._rpc = RpcClient(address, run_dir, attempt)
        client._owner = []
        client._renewals = {}
        return client

    async def __aenter__(self) -> ControllerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; a window that is still open is not renewed any more."""
        for window_id in list(self._renewals):
            self._stop_renewing(window_id)
        await self._rpc.close()

    async def start_update_weights(self, timeout_s: float, engines: int | None = None) -> Window:
        """Open a weight window, when it is this caller's turn and `engines` (default: all) are ready.

        Raises:
            WindowTimeout: when that was not so within `timeout_s`; the text says what was missing.
        """
        params: dict[str, Any] = {"timeout_s": timeout_s} | ({} if engines is None else {"engines": engines})
        if self._owner:
            params["owner"] = self._owner
        answer = await self._call("start_update_weights", params, timeout_s + _ANSWER_MARGIN_S)
        window = msgspec.convert(answer, Window)
        if self._owner:
            self._renewals[window.window_id] = asyncio.ensure_future(self._renew(window.window_id))
        return window

    async def _renew(self, window_id: str) -> None:
        """Say that the window's owner lives, until the window is over."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await self._call("renew_window", {"window_id": window_id}, _RENEW_S)
            except WindowLost:
                return
            except (ControllerError, RpcError) as error:
                # Not the end of the window yet: a controller that was stalled may hear the next one.
                log.warning("window %s could not be renewed: %s", window_id, error)

    def _stop_renewing(self, window_id: str) -> None:
        task = self._renewals.pop(window_id, None)
        if task is not None:
            task.cancel()

    async def end_update_weights(
        self, window_id: str, version: int, path: str, failed: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The engines of the window serve `version`; whoever joins later loads it from `path`.

        Args:
            failed: cell -> reason of engines that did not take it (`UpdateResult.failed`); they are replaced.

        Returns:
            `failed`, and the cells that the controller itself found without that version.

        Raises:
            WindowLost: when the window is not open any more; nothing is published then.
        """
        params = {"window_id": window_id, "version": version, "path": str(path), "failed": dict(failed or {})}
        answer = await self._call("end_update_weights", params, _CALL_S)
        self._stop_renewing(window_id)
        return dict(answer["failed"])

    async def abort_update_weights(self, window_id: str, reason: str) -> None:
        """Give a window up: its engines load the published weights again before they get traffic.

        Raises:
            WindowLost: when it is not open any more.
        """
        self._stop_renewing(window_id)
        await self._call("abort_update_weights", {"window_id": window_id, "reason": reason}, _CALL_S)

    async def published(self, version: int, path: str) -> None:
        """Tell a new controller what is published already; a lower version than it knows changes nothing."""
        await self._call("published", {"version": version, "path": str(path)}, _CALL_S)

    async def status(self) -> ControllerStatus:
        """What the controller knows now."""
        return msgspec.convert(await self._call("status", {}, _CALL_S), ControllerStatus)

    async def abort_all(self) -> dict[str, str]:
        """End every request on every engine; returns cell -> reason of those that did not answer."""
        return dict(await self._call("abort_all", {}, _CALL_S))

    async def check_weights(self) -> dict[str, str]:
        """Digest of each serving engine's tensors, equal where the weights are; `error: …` where there is none.

        Engines of one kind and one tensor-parallel size can be compared.
        """
        return dict(await self._call("check_weights", {}, _CHECK_S))

    async def stop_cell(self, cell: str, reason: str = "") -> None:
        """Stop an engine until `start_cell`; inside a weight window, at its end. Returns when the hub has taken it.

        Raises:
            ControllerError: when there is no such engine, it is an external one, or the hub refuses.
        """
        await self._call("stop_cell", {"cell": cell, "reason": reason}, _CALL_S)

    async def start_cell(self, cell: str) -> None:
        """Start a stopped engine. Raises as `stop_cell`."""
        await self._call("start_cell", {"cell": cell}, _CALL_S)

    async def statuses(self) -> dict[str, EngineRow]:
        """Each engine by its cell."""
        return {row.cell: row for row in (await self.status()).engines}

    async def dispose(self) -> None:
        """Take all engines out of the routers; every later call raises Disposed. May be repeated."""
        await self._call("dispose", {}, _CALL_S)

    async def prepare_eval(self, n: int, timeout_s: float) -> ControllerStatus:
        """As `prepare_rollout`: there are no engines that only evaluate."""
        return await self.wait_serving(n, timeout_s)

    async def prepare_rollout(self, n: int, timeout_s: float) -> ControllerStatus:
        """Wait until `n` engines serve the published weights. Raises ServingTimeout with every engine's state."""
        return await self.wait_serving(n, timeout_s)

    async def wait_serving(self, n: int, timeout_s: float) -> ControllerStatus:
        """Wait until `n` engines get traffic.

        Raises:
            ServingTimeout: with every engine's state.
        """
        answer = await self._call("wait_serving", {"n": n, "timeout_s": timeout_s}, timeout_s + _ANSWER_MARGIN_S)
        return msgspec.convert(answer, ControllerStatus)

    async def _call(self, method: str, params: dict[str, Any], timeout_s: float) -> Any:
        params = {**params, "model": self._model} if self._model else params
        try:
            return await self._rpc.call(method, params, timeout_s=timeout_s)
        except RpcRemoteError as error:
            raise _ERRORS.get(error.type_name, ControllerError)(error.text) from error
