"""Engines of the policy: the embedded CPU engine, the real SGLang, or the scripted one for tests."""

from __future__ import annotations

import json
from typing import Any

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, LaunchCommandContext, SchedulingSpec
from miles_hpc.specs.runtime import foreign_env, own_env, own_program, python_of
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import PortInfo, Probe


def engine_pool(config: Config) -> str:
    """Name of the engines' pool."""
    return f"engine-{config.model.name}-0"


def engine_spec(config: Config) -> CommandWorkerSpec:
    inference = config.inference
    commands = {"embedded": _embedded, "fake": _fake, "sglang": _sglang}

    def env(ctx: LaunchCommandContext) -> dict[str, str]:
        if inference.engine == "sglang":
            # A probe that generates takes a second and fails while paused; progress is seen in other ways.
            return {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", **foreign_env(config, "engine")}
        return own_env(config, "engine", inference.threads)

    ports = [PortInfo(name="http")]
    if inference.engine == "sglang":
        # SGLang derives further ports from the first one that it is given; it gets a run of its own.
        ports.append(PortInfo(name="nccl"))
    return CommandWorkerSpec(
        name=engine_pool(config),
        category="engine",
        runtime="engine",
        launch_command=lambda ctx: commands[inference.engine](config, ctx),
        env=env,
        scheduling=SchedulingSpec(
            num_cells=inference.engines,
            num_gpus_per_worker=inference.gpus_per_engine,
            num_cpus_per_worker=float(inference.threads),
        ),
        port_infos=tuple(ports),
        probe=Probe(
            kind="http",
            port="http",
            path="/health",
            interval=config.timing.probe_interval,
            timeout=config.timing.probe_timeout,
            start_deadline=inference.start_deadline_s,
        ),
        stop_grace=config.timing.stop_grace,
        meta=lambda cell_index: {
            "model": config.model.name,
            "engine": inference.engine,
            "gpu_offset": cell_index * max(1, inference.gpus_per_engine),
            "gpus": inference.gpus_per_engine,
        },
    )


def _embedded(config: Config, ctx: LaunchCommandContext) -> list[str]:
    address = ctx.self_addrs["http"]
    arguments = [
        *_listen(address),
        f"--model-path={config.model.path}",
        *("--threads", str(config.inference.threads)),
        *("--max-running-requests", str(config.inference.max_running_requests)),
    ]
    return own_program(config, "engine", "miles_hpc.engine.serve", *arguments, *_template(config))


def _fake(config: Config, ctx: LaunchCommandContext) -> list[str]:
    address = ctx.self_addrs["http"]
    arguments = [
        *_listen(address),
        f"--model-path={config.model.path}",
        *("--token-ms", f"{config.inference.fake_token_ms:g}"),
    ]
    return own_program(config, "engine", "miles_hpc.engine.fake", *arguments, *_template(config))


def _sglang(config: Config, ctx: LaunchCommandContext) -> list[str]:
    inference = config.inference
    program = [inference.sglang_program] if inference.sglang_program else ["-m", "sglang.launch_server"]
    given: dict[str, Any] = {"random_seed": config.seed + ctx.cell_index, "log_level": "warning"}
    if inference.gpus_per_engine > 1:
        given["tensor_parallel_size"] = inference.gpus_per_engine
    if inference.gpus_per_engine == 0:
        given["device"] = "cpu"
    if config.model.chat_template:
        given["chat_template"] = config.model.chat_template
    given["nccl_port"] = ctx.self_addrs["nccl"].port
    given |= inference.sglang
    return [
        python_of(config, "engine"),
        *program,
        f"--model-path={config.model.path}",
        *_listen(ctx.self_addrs["http"]),
        *server_arguments(given),
    ]


def server_arguments(given: dict[str, Any]) -> list[str]:
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


def _listen(address: HostAndPort) -> list[str]:
    return ["--host", address.host, "--port", str(address.port)]


def _template(config: Config) -> list[str]:
    return [f"--chat-template={config.model.chat_template}"] if config.model.chat_template else []
