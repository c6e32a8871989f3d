"""Values about engines, routers and models that do not fit together; a part of `check`, pure like it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from miles_hpc.config.schema import Config

ROUTER_POLICIES = ("random", "round_robin", "cache_aware", "power_of_two", "manual")
MODEL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")

Found = Iterator[tuple[tuple[str, ...], str]]


def _plans(config: Config) -> list[tuple[str, Any]]:
    """(where its engines are described, that table) for the policy and every model beside it."""
    return [("inference", config.inference), *((f"models.{name}", model) for name, model in config.models.items())]


def _inference(config: Config) -> Found:
    inference = config.inference
    if inference.engine != "sglang":
        for key, value in (
            *((f"{where}.sglang", plan.sglang) for where, plan in _plans(config)),
            *((f"{where}.gpus_per_engine", plan.gpus_per_engine) for where, plan in _plans(config)),
            ("inference.sglang_program", inference.sglang_program),
        ):
            if value:
                yield (
                    (key, "inference.engine"),
                    f'{key} is set with inference.engine = "{inference.engine}", which runs on the CPU: '
                    f'set inference.engine = "sglang", or leave {key} out',
                )
    urls: dict[str, str] = {}
    for where, plan in _plans(config):
        for group in plan.groups:
            if group.role != "regular":
                yield (
                    (f"{where}.groups",),
                    f'{where}.groups has role = "{group.role}": not yet; prefill, decode and placeholder groups are '
                    'planned, only "regular" ones work',
                )
        for place, arguments in (
            (f"{where}.sglang", plan.sglang),
            *((f"{where}.groups[{index}].sglang", group.sglang) for index, group in enumerate(plan.groups)),
        ):
            yield from _server_arguments(config, place, arguments)
        yield from _parallelism(config, where, plan)
        yield from _external(where, plan, urls)
        if plan.router_policy not in ROUTER_POLICIES:
            yield (
                (f"{where}.router_policy",),
                f"{where}.router_policy = {plan.router_policy!r} is not one of {', '.join(ROUTER_POLICIES)}",
            )
        elif plan.router_policy == "manual" and (where != "inference" or config.rollout.session_every != 1):
            remedy = "set rollout.session_every to 1, or " if where == "inference" else ""
            yield (
                (f"{where}.router_policy", "rollout.session_every"),
                f'{where}.router_policy = "manual" places requests by a routing key, which only the policy\'s sessions '
                f"have (rollout.session_every = {config.rollout.session_every}): {remedy}choose another policy",
            )


def _models(config: Config) -> Found:
    for name, model in config.models.items():
        if name == config.model.name:
            yield (
                (f"models.{name}", "model.name"),
                f"models.{name} is the policy's name as well (model.name): two models cannot share one, rename it",
            )
        if not MODEL_NAME.match(name):
            yield (
                (f"models.{name}",),
                f"models.{name} cannot be part of a pool's name: use letters, digits, '.', '_' and '-'",
            )
        if not model.path:
            yield ((f"models.{name}.path",), f"models.{name}.path is empty: name a HF model directory")


def _external(where: str, plan: Any, urls: dict[str, str]) -> Found:
    """`urls` (url -> key) is shared by all plans, and gets the engines of this one: one engine serves one model."""
    if plan.external and plan.groups:
        yield (
            (f"{where}.external", f"{where}.groups"),
            f"{where}.external names engines that are there already, and {where}.groups some to start: drop one",
        )
    for name, engine in plan.external.items():
        key = f"{where}.external.{name}.url"
        url = engine.url.rstrip("/").lower()
        if not _is_base_url(url):
            yield ((key,), f"{key} = {engine.url!r}: expected http://host:port of an engine's API")
        elif url in urls:
            yield ((key, urls[url]), f"{key} = {url!r} is {urls[url]} too: name each engine once")
        urls[url] = key


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname and parts.port)
            and not (parts.path or parts.query or parts.fragment or parts.username)
        )
    except ValueError:
        return False


_DECIDED_BY_THE_RUN = {
    "model_path": "model.path",
    "model": "model.path",
    "host": "network.subnet",
    "port": "network.port_range",
    "random_seed": "seed",
    "nnodes": "inference.nodes_per_engine",
    "node_rank": "inference.nodes_per_engine",
    "dist_init_addr": "inference.nodes_per_engine",
    "api_key": "inference.keyed",
    "admin_api_key": "inference.keyed",
    "config": "inference.keyed",
}


def _server_arguments(config: Config, where: str, arguments: dict[str, object]) -> Found:
    for spelled, value in arguments.items():
        name = spelled.replace("-", "_")
        if name in _DECIDED_BY_THE_RUN:
            other = _DECIDED_BY_THE_RUN[name]
            yield ((f"{where}.{spelled}", other), f"{where}.{spelled} is decided by the run ({other}): leave it out")
        if name == "log_level" and config.inference.keyed and str(value).lower() in ("info", "debug"):
            yield (
                (f"{where}.{spelled}", "inference.keyed"),
                f'{where}.{spelled} = "{value}" makes SGLang print its key in the log: '
                'use "warning", or set inference.keyed = false',
            )
        if name.startswith("disaggregation") and value not in ("null", None, False):
            yield ((f"{where}.{spelled}",), f"{where}.{spelled}: prefill and decode engines are planned, not yet there")


def _parallelism(config: Config, where: str, plan: Any) -> Found:
    inference = config.inference
    groups = [(group.gpus_per_engine, group.nodes_per_engine, group.sglang) for group in plan.groups]
    for own_gpus, own_nodes, own in groups or [(None, None, {})]:
        gpus: int = next(n for n in (own_gpus, plan.gpus_per_engine, inference.gpus_per_engine) if n is not None)
        nodes: int = own_nodes or plan.nodes_per_engine or inference.nodes_per_engine
        given = {**inference.sglang, **plan.sglang, **own}
        arguments = {key.replace("-", "_"): value for key, value in given.items()}
        names = [name for name in arguments if name in ("tensor_parallel_size", "tp_size", "tp")]
        if inference.engine != "sglang":
            if nodes > 1:
                yield (
                    (f"{where}.nodes_per_engine", "inference.engine"),
                    f'{where}.nodes_per_engine = {nodes} needs inference.engine = "sglang"',
                )
            continue
        ranks, slots = arguments[names[-1]] if names else 0, gpus * nodes
        if isinstance(ranks, bool) or not isinstance(ranks, int):
            key = f"{where}.sglang.{names[-1]}"
            yield ((key,), f"{key} = {ranks!r}: expected the number of ranks of an engine")
            continue
        pp = next((name for name in reversed(arguments) if name in ("pipeline_parallel_size", "pp_size")), "")
        stages = arguments[pp] if pp else 1
        key = f"{where}.sglang.{pp}"
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            yield ((key,), f"{key} = {stages!r}: expected the number of stages of an engine, 1 or more")
            continue
        if slots and (slots % stages or (names and ranks > 0 and slots % (ranks * stages) and not slots % ranks)):
            beside = f" with {names[-1]} = {ranks}" if names else ""
            yield (
                (key, "inference.gpus_per_engine"),
                f"{key} = {stages}{beside} does not divide the {slots} GPUs of an engine "
                f"(inference.gpus_per_engine = {gpus} x inference.nodes_per_engine = {nodes})",
            )
        if names and (ranks < 1 or (slots and slots % ranks)):
            yield (
                (f"{where}.sglang.{names[-1]}", "inference.gpus_per_engine"),
                f"{where}.sglang.{names[-1]} = {ranks} does not divide the {slots} GPUs of an engine "
                f"(inference.gpus_per_engine = {gpus} x inference.nodes_per_engine = {nodes}): "
                f"set it to a divisor, or leave it out for {slots}",
            )
        if nodes > 1 and ranks and ranks % nodes:
            yield (
                (f"{where}.sglang.{names[-1]}", "inference.nodes_per_engine"),
                f"{where}.sglang.{names[-1]} = {ranks} does not divide into inference.nodes_per_engine = {nodes} "
                f"nodes: set it to a multiple of {nodes}",
            )


def _collectives(config: Config) -> Found:
    """Trainer and engines of one update group must agree on what their collectives do."""
    if config.inference.engine != "sglang":
        return
    prefixes = ("NCCL_", "NVSHMEM_", "GLOO_", "TORCH_NCCL_")
    sides = {}
    for kind in ("trainer", "engine"):
        runtime = config.runtimes.get(kind) or config.runtimes.get("default")
        sides[kind] = dict(runtime.env) if runtime is not None else {}
    for name in sorted({*sides["trainer"], *sides["engine"]}):
        if name.startswith(prefixes) and sides["trainer"].get(name) != sides["engine"].get(name):
            yield (
                (f"runtimes.trainer.env.{name}", f"runtimes.engine.env.{name}"),
                f"{name} is {sides['trainer'].get(name)!r} for the trainer and {sides['engine'].get(name)!r} for the "
                f"engines, which share collectives: give runtimes.trainer.env.{name} and "
                f"runtimes.engine.env.{name} one value",
            )


def _transfer(config: Config) -> Found:
    inference = config.inference
    if config.mode not in ("sync", "async"):
        return
    if config.train.weight_transfer == "disk":
        started = not (inference.external or config.rollout.load_debug)
        if config.train.trainer == "hash" and inference.engine != "fake" and started:
            yield (
                ("train.trainer", "inference.engine"),
                f'train.trainer = "hash" writes no tensors, which inference.engine = "{inference.engine}" would load: '
                'set train.trainer = "torch", or inference.engine = "fake"',
            )
        return
    if config.inference.engine == "fake":
        yield (
            ("train.weight_transfer", "inference.engine"),
            'train.weight_transfer = "distributed" with inference.engine = "fake", which receives no tensors: '
            'set train.weight_transfer = "disk"',
        )
    elif config.train.trainer == "hash":
        yield (
            ("train.weight_transfer", "train.trainer"),
            'train.weight_transfer = "distributed" with train.trainer = "hash", which has no tensors to send: '
            'set train.weight_transfer = "disk"',
        )


RULES: tuple[Callable[[Config], Found], ...] = (_inference, _models, _collectives, _transfer)
