"""The routes of a weight update that a trainer broadcasts: group, session, tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from miles_hpc.engine.requests import BadRequestError, GroupMember, TensorSpec, UpdateOutcome

G = TypeVar("G")


class UpdateSession:
    """Whether tensors may be taken now; the answers are SGLang's."""

    def __init__(self) -> None:
        self.is_open = False

    def begin(self) -> UpdateOutcome:
        """Open it, once."""
        if self.is_open:
            return UpdateOutcome(False, "a weight-update session is already open; call end_weight_update() first")
        self.is_open = True
        return UpdateOutcome(True, "Success")

    def end(self) -> UpdateOutcome:
        """Close it."""
        if not self.is_open:
            return UpdateOutcome(False, "no weight-update session is open; call begin_weight_update() first")
        self.is_open = False
        return UpdateOutcome(True, "Success")

    def refusal(self) -> str:
        """Why no tensors are taken; empty when they are."""
        if self.is_open:
            return ""
        return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


class Groups(Generic[G]):
    """The weight update groups that an engine has joined; the answers are SGLang's.

    Args:
        broken: what making or leaving a group raises.
    """

    def __init__(self, broken: type[Exception] = OSError) -> None:
        self._broken = broken
        self._joined: dict[str, G] = {}

    def join(self, member: GroupMember, make: Callable[[], G]) -> UpdateOutcome:
        """Join by `make`, which may wait for the others."""
        try:
            if member.name in self._joined:
                raise self._broken(f"{member.name} exists already")
            self._joined[member.name] = make()
        except self._broken as error:
            return UpdateOutcome(False, f"Failed to initialize custom process group: {error}.")
        return UpdateOutcome(True, "Succeeded to initialize custom process group.")

    def leave(self, name: str, close: Callable[[G], None] = lambda group: None) -> UpdateOutcome:
        """Leave by `close`."""
        if name not in self._joined:
            return UpdateOutcome(False, "The group to be destroyed does not exist.")
        try:
            close(self._joined.pop(name))
        except self._broken as error:
            return UpdateOutcome(False, f"Failed to destroy custom process group: {error}.")
        return UpdateOutcome(True, "Succeeded to destroy custom process group.")

    def find(self, name: str) -> G | None:
        """The group of that name."""
        return self._joined.get(name)

    def refusal(self, name: str) -> str:
        """Why nothing comes from that group; empty when it was joined."""
        if name in self._joined:
            return ""
        return f"group {name} is not in {sorted(self._joined)}: call init_weights_update_group first"


def group_member(body: Mapping[str, Any]) -> GroupMember:
    """The body of `/init_weights_update_group`; the embedded engine is one rank, the offset's."""
    address, port = _text(body, "master_address"), _number(body, "master_port")
    backend = body.get("backend", "nccl")
    if backend != "gloo":
        raise BadRequestError(f"backend must be gloo on a CPU, got {backend!r}.")
    rank, world_size = _number(body, "rank_offset"), _number(body, "world_size")
    if not 0 < rank < world_size:
        raise BadRequestError(f"rank_offset {rank} does not lie in 1..{world_size - 1}.")
    host = f"[{address}]" if ":" in address else address
    return GroupMember(_text(body, "group_name"), f"{host}:{port}", rank, world_size, backend)


def group_name(body: Mapping[str, Any]) -> str:
    """The group that a body names; SGLang's default otherwise."""
    return str(body.get("group_name") or "weight_update_group")


def tensor_specs(body: Mapping[str, Any]) -> list[TensorSpec]:
    """The tensors that a body of `/update_weights_from_distributed` announces."""
    parts = [body.get(key) for key in ("names", "dtypes", "shapes")]
    names, dtypes, shapes = (part if isinstance(part, list) else [] for part in parts)
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise BadRequestError("names, dtypes and shapes must be lists of one length.")
    return [
        TensorSpec(str(name), str(dtype), tuple(int(size) for size in shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{key} must be a text, got {value!r}.")
    return value


def _number(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequestError(f"{key} must be an integer, got {value!r}.")
    return value
