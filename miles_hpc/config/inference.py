"""The tables of the schema about engines and routers."""

# Annotations are not put off here: msgspec would compile the text of each in every process that reads a config, which
# is a tenth of the start of a hub.

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from miles_hpc.config.section import NonNegativeInt, PositiveFloat, PositiveInt
from miles_hpc.config.section import describe as _d
from miles_hpc.config.section import path as _path


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file; unknown keys are refused."""


class ExternalEngineConfig(_Section, frozen=True):
    """An engine that somebody else runs: it gets traffic and weights like our own, and is never started or stopped."""

    url: Annotated[str, _d("`http://host:port` of its SGLang API.")] = ""
    key_file: Annotated[str, _path("File with the key that it asks for, readable by you alone; empty: none.")] = ""
    ranks: Annotated[PositiveInt, _d("Its processes that hold weights: members of a broadcast.")] = 1


class EngineGroupConfig(_Section, frozen=True):
    """A group of equal engines beside others: a pool of its own, `engine-<model>-<n>`. Unset values are those above."""

    engines: Annotated[PositiveInt, _d("Engines of the group.")] = 1
    gpus_per_engine: Annotated[NonNegativeInt | None, _d("GPUs of one engine on each of its nodes.")] = None
    nodes_per_engine: Annotated[PositiveInt | None, _d("Nodes that one engine spans.")] = None
    sglang: Annotated[dict[str, Any], _d("ServerArgs of this group; each wins over inference.sglang's.")] = {}
    role: Annotated[
        Literal["regular", "prefill", "decode", "placeholder"], _d("What the group does; only `regular` so far.")
    ] = "regular"


class InferenceConfig(_Section, frozen=True):
    """Engines and routers."""

    engine: Annotated[
        Literal["embedded", "fake", "sglang"],
        _d("`embedded`: the torch CPU engine; `sglang`: the real SGLang; `fake`: scripted tokens, for tests."),
    ] = "embedded"
    engines: Annotated[PositiveInt, _d("Engines of the policy.")] = 2
    gpus_per_engine: Annotated[NonNegativeInt, _d("GPUs of one engine on each of its nodes; 0 on a CPU.")] = 0
    nodes_per_engine: Annotated[PositiveInt, _d("Nodes that one engine of the real SGLang spans.")] = 1
    groups: Annotated[
        list[EngineGroupConfig], _d("Engine groups; empty: one group of `engines` engines as described here.")
    ] = []
    external: Annotated[
        dict[str, ExternalEngineConfig],
        _d("Engines that are there already, by a name; in place of engines of the run."),
    ] = {}
    router_policy: Annotated[str, _d("Load-balancing policy of the router.")] = "round_robin"
    router_port: Annotated[NonNegativeInt, _d("Fixed port of the router; 0: a free one is chosen.")] = 0
    max_running_requests: Annotated[PositiveInt, _d("Requests in an embedded engine's running batch.")] = 64
    threads: Annotated[PositiveInt, _d("CPU threads of one embedded engine.")] = 1
    pause_mode: Annotated[
        Literal["retract", "abort", "in_place"], _d("What happens to running requests while weights change.")
    ] = "retract"
    fake_token_ms: Annotated[float, Meta(ge=0), _d("Time that a fake engine takes for a token, in milliseconds.")] = 1.0
    sglang: Annotated[dict[str, Any], _d("ServerArgs of the real SGLang, by field name.")] = {}
    sglang_program: Annotated[
        str, _path("Python file that is started in place of `-m sglang.launch_server`; empty: SGLang's own.")
    ] = ""
    keyed: Annotated[bool, _d("The real SGLang answers only to the run's key, which lies in the run's secrets.")] = True
    start_deadline_s: Annotated[PositiveFloat, _d("Until a started engine must be healthy.")] = 1800.0
    stall_s: Annotated[
        PositiveFloat, _d("An engine whose scheduler gives no sign for this long, outside a window, is replaced.")
    ] = 45.0
    request_timeout_s: Annotated[PositiveFloat, _d("Deadline of one generate request, retries included.")] = 300.0
    window_timeout_s: Annotated[PositiveFloat, _d("Longest weight update window; then it is aborted.")] = 600.0


class ServedModelConfig(_Section, frozen=True):
    """A model beside the policy, with a router and engines of its own. Unset values are those of [inference]."""

    path: Annotated[str, _path("HF model directory.")] = ""
    chat_template: Annotated[str, _path("Chat template file; empty: the tokenizer's.")] = ""
    engines: Annotated[PositiveInt, _d("Engines of this model.")] = 1
    gpus_per_engine: Annotated[NonNegativeInt | None, _d("GPUs of one engine on each of its nodes.")] = None
    nodes_per_engine: Annotated[PositiveInt | None, _d("Nodes that one engine spans.")] = None
    groups: Annotated[list[EngineGroupConfig], _d("Engine groups, in place of `engines`.")] = []
    external: Annotated[
        dict[str, ExternalEngineConfig],
        _d("Engines that are there already, by a name; in place of engines of the run."),
    ] = {}
    sglang: Annotated[dict[str, Any], _d("ServerArgs of these engines; each wins over inference.sglang's.")] = {}
    router_policy: Annotated[str, _d("Load-balancing policy of its router.")] = "round_robin"
    update_weights: Annotated[
        bool, _d("Its engines wait for weights that you publish by windows of your own; off: they serve `path`.")
    ] = False
