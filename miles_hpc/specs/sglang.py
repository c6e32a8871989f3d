"""The command of the real SGLang: every ServerArgs field by its name, and what the run itself decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import LaunchCommandContext
from miles_hpc.specs.runtime import collective_env, foreign_env, python_of
from miles_hpc.wire.security import sglang_config_path

TENSOR_PARALLEL = ("tensor_parallel_size", "tp_size", "tp")
PIPELINE_PARALLEL = ("pipeline_parallel_size", "pp_size")
"""The field, and the short names that SGLang's command line takes for it."""


def sglang_command(
    config: Config,
    ctx: LaunchCommandContext,
    *,
    model: str,
    path: str,
    chat_template: str,
    arguments: Mapping[str, Any],
    gpus: int,
    nodes: int,
    first_engine: int,
) -> list[str]:
    """The argument list of one worker (one node) of an engine.

    Args:
        model: name that it is served under.
        arguments: `[inference.sglang]` with the group's own values; each wins over what is decided here.
        gpus: GPUs of the engine on one node; 0 on a CPU.
        nodes: nodes that the engine spans, one worker each.
        first_engine: engines in the groups before this one.
    """
    inference = config.inference
    program = [inference.sglang_program] if inference.sglang_program else ["-m", "sglang.launch_server"]
    given: dict[str, Any] = {
        "served_model_name": model,
        "random_seed": config.seed + first_engine + ctx.cell_index,
        # At `info` the start-up line prints every argument, the key from its file included.
        "log_level": "warning",
        "enable_metrics": True,  # the health watch reads them
        "stream_interval": stream_interval(config.rollout.max_response_tokens),
        # Otherwise each event of a stream holds the whole answer so far. Every SGLang with versions by token has it.
        "incremental_streaming_output": True,
    }
    if (tensor := tensor_parallel(gpus, nodes, arguments)) > 1:
        given["tensor_parallel_size"] = tensor
    if gpus == 0:
        given["device"] = "cpu"
    if inference.pause_mode == "in_place":
        # Requests that stay in the batch forbid a flush, and a new one would go on from keys and values of the old
        # weights: tokens of neither version (seen).
        given["disable_radix_cache"] = True
    if chat_template:
        given["chat_template"] = chat_template
    if nodes > 1:
        master = ctx.cell_addrs[0]["dist"]
        given |= {"nnodes": nodes, "node_rank": ctx.worker_index, "dist_init_addr": master.netloc}
    else:
        # Without it SGLang takes a free port by itself, in a range that is not the run's.
        given["nccl_port"] = ctx.self_addrs["nccl"].port
    given |= _by_field(arguments)
    address = ctx.self_addrs["http"]
    return [
        python_of(config, "engine"),
        *program,
        f"--model-path={path}",
        *("--host", address.host, "--port", str(address.port)),
        # SGLang looks for the bare word `--config`.
        *(("--config", str(sglang_config_path(Path(ctx.run_dir), ctx.attempt))) if inference.keyed else ()),
        *server_arguments(given),
    ]


def stream_interval(most_tokens: int) -> int:
    """Tokens between two events of a streamed answer.

    An event costs a kilobyte and a wake-up of engine, router and client beside its tokens; few events would leave a
    client in silence for so long that it takes the engine for lost (`inference.streams`).
    """
    return max(8, min(64, most_tokens // 128))


def pipeline_parallel(arguments: Mapping[str, Any]) -> int:
    """Stages of an engine that follow each other."""
    return int(_last_of(PIPELINE_PARALLEL, arguments) or 1)


def tensor_parallel(gpus: int, nodes: int, arguments: Mapping[str, Any]) -> int:
    """Ranks that share each layer: what the arguments say, or the GPUs of all nodes, divided among the stages."""
    own = _last_of(TENSOR_PARALLEL, arguments)
    return int(own) if own is not None else max(1, max(1, gpus) * nodes // pipeline_parallel(arguments))


def _last_of(names: tuple[str, ...], arguments: Mapping[str, Any]) -> Any:
    """Of several spellings SGLang takes the last one: a group's own comes after that of all groups."""
    given = [value for name, value in arguments.items() if name.replace("-", "_") in names]
    return given[-1] if given else None


def sglang_env(config: Config) -> dict[str, str]:
    """Environment of an engine's worker."""
    return {
        # A probe that generates takes a second and fails while generation is paused; the controller watches progress.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        **collective_env(config, "engine"),
        **foreign_env(config, "engine"),
    }


def _by_field(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Flags spelled with hyphens, and SGLang's short names, become the field's name."""
    fields = {name.replace("-", "_"): value for name, value in arguments.items()}
    short = {name: names[0] for names in (TENSOR_PARALLEL, PIPELINE_PARALLEL) for name in names}
    return {short.get(name, name): value for name, value in fields.items()}


def server_arguments(given: Mapping[str, Any]) -> list[str]:
    """ServerArgs by field name as command-line arguments: `true` is a bare flag, `false` leaves it out.

    A value stands in one word with its flag, so that one that starts with a hyphen is not taken for a flag.
    """
    arguments: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)]
        elif isinstance(value, dict):
            arguments.append(f"{flag}={json.dumps(value)}")
        else:
            arguments.append(f"{flag}={value}")
    return arguments
