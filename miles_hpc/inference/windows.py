"""What controller and its callers say to each other about engines and weight windows."""

from __future__ import annotations

import msgspec

from miles_hpc.wire.ids import Generation

RPC_PORT = "rpc"
CONTROLLER_POOL = "controller"


class ControllerError(RuntimeError):
    """The controller did not do what it was asked."""


class WindowTimeout(ControllerError):
    """No weight window could begin within the deadline; the text says what it waited for."""


class WindowLost(ControllerError):
    """The window is not open any more: it was ended, aborted, or ran into its deadline."""


class ServingTimeout(ControllerError):
    """Fewer engines than wanted serve at the deadline."""


class Disposed(ControllerError):
    """The controller was disposed of: the run ends."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a window: calls to it are only meant for this generation of its cell."""

    cell: str
    generation: Generation
    url: str
    gpu_offset: int = 0
    gpus: int = 0
    """GPUs of all its nodes; 0 on a CPU."""
    ranks: int = 1
    """Its members of a weight update group."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A weight window: until its end no other begins, and no engine loads weights by itself."""

    window_id: str
    engines: list[EngineInfo]


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in the controller's status. `weight_version` is -1 before its first weights."""

    cell: str
    generation: Generation
    url: str
    state: str
    weight_version: int
    reason: str = ""


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows. `published` is 0 before the first publication."""

    engines: list[EngineRow]
    published: int
    path: str
    window: str
    routers: list[str]
