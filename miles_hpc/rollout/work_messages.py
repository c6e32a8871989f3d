"""What executor and rollout workers say to each other on the `work` port.

Frame 0 is one of the structs below as tagged msgpack, fields append-only with defaults; a GroupDone has the parcel of
the group's RolloutBatch in the frame behind it. A group is named by (incarnation, id).
"""

from __future__ import annotations

import msgspec

from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.wire.ids import Generation


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# ------------------------------------------------------------------------------------------ worker -> executor
class WorkHello(_Message, frozen=True, kw_only=True):
    """First on every connection. `holds` are groups of `incarnation` that run or are kept for replay."""

    worker: str
    generation: Generation
    pid: int
    credits: int
    incarnation: int = 0
    holds: list[str] = []


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """How far a running group is: what its slowest sample does, and for how long."""

    group: str
    stage: str
    seconds: float


class WorkBeat(_Message, frozen=True, kw_only=True):
    """Once a second, from the worker's event loop: a worker whose loop stands still is silent."""

    incarnation: int
    running: list[Stage] = []


class GroupDone(_Message, frozen=True, kw_only=True):
    """A complete, scored group; its parcel follows."""

    incarnation: int
    group: str
    reward_calls: int = 0
    seconds: float = 0.0


class GroupFailed(_Message, frozen=True, kw_only=True):
    """A group that was given up. `text` holds the traceback."""

    incarnation: int
    group: str
    reason: str
    text: str = ""
    reward_calls: int = 0


# ------------------------------------------------------------------------------------------ executor -> worker
class WorkWelcome(_Message, frozen=True, kw_only=True):
    """Answer to a hello, and to all workers when an incarnation begins: work of lower ones is dropped."""

    incarnation: int


class RunGroup(_Message, frozen=True, kw_only=True):
    """Generate and score `samples` samples of a prompt."""

    incarnation: int
    spec: GroupSpec
    prompt: Prompt
    samples: int
    weight_version: int
    evaluation: bool = False


class GroupReceived(_Message, frozen=True, kw_only=True):
    """The executor has it in memory. The worker keeps it until FreeGroups, within its `keep_bytes`."""

    incarnation: int
    group: str


class FreeGroups(_Message, frozen=True, kw_only=True):
    """Stop or forget these groups."""

    incarnation: int
    groups: list[str]
    reason: str


class BeatSeen(_Message, frozen=True, kw_only=True):
    """The executor is alive."""


ToExecutor = WorkHello | WorkBeat | GroupDone | GroupFailed
ToWorker = WorkWelcome | RunGroup | GroupReceived | FreeGroups | BeatSeen

encode = msgspec.msgpack.Encoder().encode
decode_to_executor = msgspec.msgpack.Decoder(ToExecutor).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
