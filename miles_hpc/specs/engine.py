"""Engines of the models: the embedded CPU engine, the real SGLang, or the scripted one for tests; a pool per group."""

from __future__ import annotations

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, LaunchCommandContext, SchedulingSpec
from miles_hpc.specs.models import Group, ServedModel, served_models
from miles_hpc.specs.own import timed_probe
from miles_hpc.specs.runtime import own_env, own_program
from miles_hpc.specs.sglang import sglang_command, sglang_env
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import HttpCall, PortInfo

FAREWELL = (
    HttpCall(path="/abort_request", body='{"abort_all": true}'),
    HttpCall(path="/continue_generation", body="{}"),
)
"""SGLang waits for its requests after SIGTERM, and while it is paused for ever (seen)."""

SGLANG_PARTS = ("sglang::scheduler", "sglang::detokenizer", "sglang::data_parallel_controller")
"""Titles of the processes of SGLang (0.5.23) that an engine does not survive. Its own watchdog takes seconds to say so,
and its server answers health checks meanwhile (seen)."""


def engine_specs(config: Config) -> list[CommandWorkerSpec]:
    """A pool for each group of each model."""
    return [_group_spec(config, model, group) for model in served_models(config) for group in model.groups]


def _group_spec(config: Config, model: ServedModel, group: Group) -> CommandWorkerSpec:
    inference = config.inference

    def command(ctx: LaunchCommandContext) -> list[str]:
        if inference.engine == "embedded":
            return _embedded(config, model, ctx)
        if inference.engine == "fake":
            return _fake(config, model, ctx)
        return sglang_command(
            config,
            ctx,
            model=model.name,
            path=model.path,
            chat_template=model.chat_template,
            arguments=group.sglang,
            gpus=group.gpus,
            nodes=group.nodes,
            first_engine=group.first_engine,
        )

    def env(ctx: LaunchCommandContext) -> dict[str, str]:
        if inference.engine == "sglang":
            return sglang_env(config)
        return own_env(config, "engine", inference.threads)

    ports = [PortInfo(name="http")]
    if inference.engine == "sglang":
        # SGLang derives further ports from the first one that it is given; it gets a run of its own.
        ports.append(PortInfo(name="nccl") if group.nodes == 1 else PortInfo(name="dist", mode="master"))
    return CommandWorkerSpec(
        name=model.engine_pool(group.index),
        category="engine",
        runtime="engine",
        launch_command=command,
        env=env,
        scheduling=SchedulingSpec(
            num_cells=group.engines,
            num_workers_per_cell=group.nodes,
            num_gpus_per_worker=group.gpus,
            num_cpus_per_worker=float(inference.threads),
        ),
        port_infos=tuple(ports),
        # Its HTTP process may be busy. The controller, which sees its scheduler move, judges silence by the same time.
        probe=timed_probe(config, "http", "http", start_deadline=inference.start_deadline_s, silence=inference.stall_s),
        stop_grace=config.timing.stop_grace,
        farewell=FAREWELL if inference.engine == "sglang" else (),
        essential_processes=SGLANG_PARTS if inference.engine == "sglang" else (),
        meta=lambda cell_index: {
            "model": model.name,
            "engine": inference.engine,
            "gpu_offset": group.first_gpu + cell_index * group.slots,
            "gpus": group.gpus * group.nodes,
            "ranks": group.ranks,
        },
    )


def _embedded(config: Config, model: ServedModel, ctx: LaunchCommandContext) -> list[str]:
    address = ctx.self_addrs["http"]
    arguments = [
        *_listen(address),
        "--incremental-streaming-output",
        f"--model-path={model.path}",
        *("--threads", str(config.inference.threads)),
        *("--max-running-requests", str(config.inference.max_running_requests)),
    ]
    return own_program(config, "engine", "miles_hpc.engine.serve", *arguments, *_template(model))


def _fake(config: Config, model: ServedModel, ctx: LaunchCommandContext) -> list[str]:
    address = ctx.self_addrs["http"]
    arguments = [
        *_listen(address),
        "--incremental-streaming-output",
        f"--model-path={model.path}",
        *("--token-ms", f"{config.inference.fake_token_ms:g}"),
    ]
    return own_program(config, "engine", "miles_hpc.engine.fake", *arguments, *_template(model))


def _listen(address: HostAndPort) -> list[str]:
    return ["--host", address.host, "--port", str(address.port)]


def _template(model: ServedModel) -> list[str]:
    return [f"--chat-template={model.chat_template}"] if model.chat_template else []
