"""What executor and rollout workers say to each other on the `work` port.

Frame 0 is a list of the structs below as tagged msgpack, fields append-only with defaults: all that one end had to say
in one turn of its loop. Each GroupsDone without a `ref` takes the next frame behind it, the parcel of the groups'
RolloutBatch. A group is named by (incarnation, id).
"""

from __future__ import annotations

import msgspec

from miles_hpc.rollout.data import Prompt
from miles_hpc.rollout.sample import GroupSpec, PartialSample
from miles_hpc.transport.carriers import ParcelRef
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
    running: list[str] = []
    oldest: list[Stage] = []
    """Of some of the groups, those that were begun first."""


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A complete, scored group."""

    group: str
    samples: int
    """Rows that it has in the parcel."""
    reward_calls: int = 0
    stats: dict[str, float] = {}
    categories: list[str] = []
    """Words that the rewards of its samples were sorted under, one a row; empty: there are none."""


class GroupsDone(_Message, frozen=True, kw_only=True):
    """Complete groups, in the order in which they lie in one parcel: small ones that ended in one turn of the worker's
    loop, or a large one alone."""

    incarnation: int
    groups: list[Done]
    ref: ParcelRef | None = None
    """Where the parcel can be fetched; None: it follows."""


class GroupPartial(_Message, frozen=True, kw_only=True):
    """A group that was interrupted, and what its samples have; the worker keeps nothing of it."""

    incarnation: int
    group: str
    samples: list[PartialSample]


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


class EvalSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How an evaluated data set is sampled."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_response_tokens: int = 0
    """0: as in training."""
    generate: str = ""
    """Generate function; empty: a single turn."""


class RunGroup(_Message, frozen=True, kw_only=True):
    """Generate and score `samples` samples of a prompt."""

    incarnation: int
    spec: GroupSpec
    prompt: Prompt
    samples: int
    weight_version: int
    evaluation: bool = False
    sampling: EvalSampling | None = None
    """Of an evaluated data set; None: as configured for training."""


class InterruptGroups(_Message, frozen=True, kw_only=True):
    """End these groups now and send what they have."""

    incarnation: int
    groups: list[str]


class GroupsReceived(_Message, frozen=True, kw_only=True):
    """The executor has them in memory. The worker keeps them until FreeGroups, within its `keep_bytes`."""

    incarnation: int
    groups: list[str]


class SendInline(_Message, frozen=True, kw_only=True):
    """The parcels of these groups could not be fetched: send them on this connection."""

    incarnation: int
    groups: list[str]


class FreeGroups(_Message, frozen=True, kw_only=True):
    """Stop or forget these groups."""

    incarnation: int
    groups: list[str]
    reason: str


class BeatSeen(_Message, frozen=True, kw_only=True):
    """The executor is alive."""


ToExecutor = WorkHello | WorkBeat | GroupsDone | GroupPartial | GroupFailed
ToWorker = WorkWelcome | RunGroup | InterruptGroups | GroupsReceived | SendInline | FreeGroups | BeatSeen

encode = msgspec.msgpack.Encoder().encode
decode_to_executor = msgspec.msgpack.Decoder(list[ToExecutor]).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
