"""Engines of the policy: the embedded CPU engine, the real SGLang, or the scripted one for tests; a pool per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_hpc.config.schema import Config, EngineGroupConfig
from miles_hpc.specs.base import CommandWorkerSpec, LaunchCommandContext, SchedulingSpec
from miles_hpc.specs.own import timed_probe
from miles_hpc.specs.runtime import own_env, own_program
from miles_hpc.specs.sglang import TENSOR_PARALLEL, sglang_command, sglang_env
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.messages import PortInfo


@dataclass(frozen=True)
class Group:
    """One group of engines, complete: what it leaves out is filled in."""

    index: int
    engines: int
    gpus: int
    """GPUs of one engine on each of its nodes; 0 on a CPU."""
    nodes: int
    first_engine: int
    """Engines in the groups before it."""
    first_gpu: int
    """GPUs in the groups before it."""
    sglang: dict[str, Any]

    @property
    def ranks(self) -> int:
        """Processes of one engine that hold weights: its members of a weight update group."""
        parallel = {name.replace("-", "_"): value for name, value in self.sglang.items()}
        tensor = next((parallel[name] for name in TENSOR_PARALLEL if name in parallel), max(1, self.gpus) * self.nodes)
        return int(tensor) * int(parallel.get("pp_size", parallel.get("pipeline_parallel_size", 1)))

    @property
    def slots(self) -> int:
        """GPUs of one engine on all of its nodes; on a CPU, its ranks."""
        return self.gpus * self.nodes or self.ranks


def engine_groups(config: Config) -> list[Group]:
    """The groups of a run, in order; without `inference.groups` there is one."""
    inference = config.inference
    groups: list[Group] = []
    engines = gpus = 0
    for index, group in enumerate(inference.groups or [EngineGroupConfig(engines=inference.engines)]):
        found = Group(
            index=index,
            engines=group.engines,
            gpus=inference.gpus_per_engine if group.gpus_per_engine is None else group.gpus_per_engine,
            nodes=group.nodes_per_engine or inference.nodes_per_engine,
            first_engine=engines,
            first_gpu=gpus,
            sglang={**inference.sglang, **group.sglang},
        )
        groups.append(found)
        engines += found.engines
        gpus += found.engines * found.slots
    return groups


def total_engines(config: Config) -> int:
    """Engines of all groups."""
    return sum(group.engines for group in engine_groups(config))


def engine_pool(config: Config, group: int = 0) -> str:
    """Name of a group's pool."""
    return f"engine-{config.model.name}-{group}"


def engine_specs(config: Config) -> list[CommandWorkerSpec]:
    """A pool for each group."""
    return [_group_spec(config, group) for group in engine_groups(config)]


def _group_spec(config: Config, group: Group) -> CommandWorkerSpec:
    inference = config.inference

    def command(ctx: LaunchCommandContext) -> list[str]:
        if inference.engine == "embedded":
            return _embedded(config, ctx)
        if inference.engine == "fake":
            return _fake(config, ctx)
        return sglang_command(
            config,
            ctx,
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
        name=engine_pool(config, group.index),
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
        probe=timed_probe(config, "http", "http", start_deadline=inference.start_deadline_s),
        stop_grace=config.timing.stop_grace,
        meta=lambda cell_index: {
            "model": config.model.name,
            "engine": inference.engine,
            "gpu_offset": group.first_gpu + cell_index * group.slots,
            "gpus": group.gpus * group.nodes,
            "ranks": group.ranks,
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


def _listen(address: HostAndPort) -> list[str]:
    return ["--host", address.host, "--port", str(address.port)]


def _template(config: Config) -> list[str]:
    return [f"--chat-template={config.model.chat_template}"] if config.model.chat_template else []
