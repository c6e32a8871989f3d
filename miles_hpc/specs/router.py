"""The router: the real sglang-router, started without engines; the controller registers them."""

from __future__ import annotations

import ipaddress
import math
from pathlib import Path

from miles_hpc.config.schema import Config
from miles_hpc.specs.base import CommandWorkerSpec, LaunchCommandContext, SchedulingSpec
from miles_hpc.specs.models import ServedModel, served_models
from miles_hpc.specs.own import timed_probe
from miles_hpc.specs.runtime import foreign_env, python_of
from miles_hpc.wire.messages import PortInfo
from miles_hpc.wire.security import http_key_path

_PROGRAM = str(Path(__file__).parents[1] / "inference" / "start_router.py")
_KEY_FILE = "MILES_HPC_ROUTER_KEY"


def asks_for_key(config: Config) -> bool:
    """Whether router and engines of a run answer only to its key."""
    return config.inference.keyed and config.inference.engine == "sglang"


def router_pool(config: Config) -> str:
    """Name of the policy's router pool."""
    return f"router-{config.model.name}"


def router_specs(config: Config) -> list[CommandWorkerSpec]:
    """A router for each model."""
    return [_router_spec(config, model) for model in served_models(config)]


def _router_spec(config: Config, model: ServedModel) -> CommandWorkerSpec:
    fixed = model.router_port

    def command(ctx: LaunchCommandContext) -> list[str]:
        http, prometheus = ctx.self_addrs["http"], ctx.self_addrs["prometheus"]
        return [
            python_of(config, "router"),
            _PROGRAM,
            *("--host", router_host(http.host)),
            *("--port", str(http.port)),
            *("--policy", model.router_policy),
            *("--prometheus-host", prometheus.host),
            *("--prometheus-port", str(prometheus.port)),
            *("--log-level", "warn"),
            # The controller takes a lost engine out at once; these bound the harm until it has.
            *("--health-check-interval-secs", "1"),
            *("--health-check-timeout-secs", "2"),
            *("--health-failure-threshold", "2"),
            *("--health-success-threshold", "1"),
            # Engines answer it at once, paused or busy (SGLang: by SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0), without
            # a key, and only when their model is loaded.
            *("--health-check-endpoint", "/health"),
            *("--worker-startup-check-interval", "1"),
            *("--worker-startup-timeout-secs", "60"),
            *("--retry-max-retries", "5"),
            *("--retry-max-backoff-ms", "500"),
            # A breaker would hold a healed engine out for a minute; health checks and the controller do its job.
            "--disable-circuit-breaker",
            # Clients own the deadline of a request.
            *("--request-timeout-secs", str(max(1800, math.ceil(config.inference.request_timeout_s) + 60))),
            # The default lets SIGTERM wait three minutes for requests in flight; their clients retry them.
            *("--shutdown-grace-period-secs", "1"),
        ]

    def env(ctx: LaunchCommandContext) -> dict[str, str]:
        key = {_KEY_FILE: str(http_key_path(Path(ctx.run_dir), ctx.attempt))} if asks_for_key(config) else {}
        return {**foreign_env(config, "router"), **key}

    return CommandWorkerSpec(
        name=model.router_pool,
        category="router",
        runtime="router",
        launch_command=command,
        env=env,
        scheduling=SchedulingSpec(num_cpus_per_worker=0.5),
        port_infos=(
            PortInfo(name="http", static_port=fixed, allow_dynamic=not fixed),
            PortInfo(name="prometheus"),
        ),
        probe=timed_probe(config, "http", "http", path="/liveness"),
        stop_grace=config.timing.stop_grace,
        meta=lambda cell_index: {"model": model.name},
    )


def router_host(host: str) -> str:
    """The form of `--host` that the router takes: an IP literal, version 6 in brackets; a name makes it exit.

    Raises:
        ValueError: when `host` is not an IP literal.
    """
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError as error:
        raise ValueError(f"the router listens on IP literals only, got {host!r}: set network.subnet") from error
