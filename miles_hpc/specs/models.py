"""The models that a run serves, each with its groups of engines: what is left out in the config is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from miles_hpc.config.schema import Config, EngineGroupConfig, ExternalEngineConfig
from miles_hpc.specs.sglang import pipeline_parallel, tensor_parallel


class Group(msgspec.Struct, frozen=True):
    """Engines that are equal: a pool of their own."""

    index: int
    engines: int
    gpus: int
    """GPUs of one engine on each of its nodes; 0 on a CPU."""
    nodes: int
    first_engine: int
    """Engines in the model's groups before it."""
    first_gpu: int
    """GPUs in all groups before it."""
    sglang: dict[str, Any]

    @property
    def ranks(self) -> int:
        """Processes of one engine that hold weights: its members of a weight update group."""
        return tensor_parallel(self.gpus, self.nodes, self.sglang) * pipeline_parallel(self.sglang)

    @property
    def slots(self) -> int:
        """GPUs of one engine on all of its nodes; on a CPU, its ranks."""
        return self.gpus * self.nodes or self.ranks


class ServedModel(msgspec.Struct, frozen=True):
    """One model: the policy, or one beside it."""

    name: str
    path: str
    chat_template: str
    router_policy: str
    router_port: int
    updated: bool
    """Its engines get traffic when they took published weights; without that, as soon as they are healthy."""
    groups: tuple[Group, ...]
    external: Mapping[str, ExternalEngineConfig]

    @property
    def router_pool(self) -> str:
        """Name of its router's pool."""
        return f"router-{self.name}"

    def engine_pool(self, group: int) -> str:
        """Name of a group's pool."""
        return f"engine-{self.name}-{group}"

    @property
    def engines(self) -> int:
        """Engines of all groups, and external ones."""
        return sum(group.engines for group in self.groups) + len(self.external)


def served_models(config: Config) -> list[ServedModel]:
    """All models of a run, the policy first."""
    inference, policy = config.inference, config.model
    first_gpu = 0
    found = []
    plans: list[tuple[str, Any, Any, int, bool]] = [(policy.name, policy, inference, inference.router_port, True)]
    plans += [(name, model, model, 0, model.update_weights) for name, model in config.models.items()]
    for name, source, engines, port, updated in plans:
        groups = () if engines.external else _groups(config, engines, first_gpu)
        first_gpu += sum(group.engines * group.slots for group in groups)
        found.append(
            ServedModel(
                name=name,
                path=source.path,
                chat_template=source.chat_template,
                router_policy=engines.router_policy,
                router_port=port,
                updated=updated,
                groups=groups,
                external=engines.external,
            )
        )
    return found


def _groups(config: Config, plan: Any, first_gpu: int) -> tuple[Group, ...]:
    """The groups of one model; without `groups` in its table there is one."""
    inference = config.inference
    groups: list[Group] = []
    engines = 0
    for index, group in enumerate(plan.groups or [EngineGroupConfig(engines=plan.engines)]):
        gpus = _first_set(group.gpus_per_engine, plan.gpus_per_engine, inference.gpus_per_engine)
        found = Group(
            index=index,
            engines=group.engines,
            gpus=gpus,
            nodes=_first_set(group.nodes_per_engine, plan.nodes_per_engine, inference.nodes_per_engine),
            first_engine=engines,
            first_gpu=first_gpu,
            sglang={**inference.sglang, **plan.sglang, **group.sglang},
        )
        groups.append(found)
        engines += found.engines
        first_gpu += found.engines * found.slots
    return tuple(groups)


def _first_set(*values: int | None) -> int:
    return next(value for value in values if value is not None)
