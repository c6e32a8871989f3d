"""What the agent of a node reads of a resolved config: a small process that takes little of a large schema."""

# Annotations are not put off here: msgspec would compile the text of each in every process that reads a config, which
# is a tenth of the start of a hub.

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from miles_hpc.config.errors import ConfigError
from miles_hpc.config.section import NonNegativeInt, PositiveInt
from miles_hpc.config.section import describe as _d
from miles_hpc.config.timing import Timing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESOLVED = "config.resolved.toml"


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file; unknown keys are refused."""


class ClusterConfig(_Section, frozen=True):
    """Where the run lives."""

    local_nodes: Annotated[
        PositiveInt, _d("Agents started on this machine by `miles-hpc run`, on 127.0.0.2 and up.")
    ] = 1
    spare_nodes: Annotated[NonNegativeInt, _d("Nodes kept free for replacements.")] = 0
    scratch: Annotated[
        str,
        _d(
            "Node-local directory for temporary files and caches of compiled code; empty, or not usable on a node: the "
            "first usable of SLURM_TMPDIR, TMPDIR, /tmp, /dev/shm."
        ),
    ] = ""


class LogsConfig(_Section, frozen=True):
    """Logs of workers; those of agents and hubs always lie in the run directory."""

    local_dir: Annotated[
        str,
        _d(
            "Node-local directory that the logs of workers go to first; they are brought to the run directory every "
            "few seconds, and whole when the worker ends. Empty: straight to the run directory."
        ),
    ] = ""


class NetworkConfig(_Section, frozen=True):
    """Addresses and ports."""

    interface: Annotated[
        str, _d("Interface whose addresses the hub and workers use; empty: every routable one is tried.")
    ] = ""
    subnet: Annotated[str, _d("CIDR that the chosen address must lie in; empty: any.")] = ""
    port_range: Annotated[
        tuple[int, int] | None,
        _d(
            "First and last dynamic port of workers and hub; unset: 20000 up to the kernel's ephemeral range, for "
            "the hub any."
        ),
    ] = None


class GpuConfig(_Section, frozen=True):
    """GPUs that others still use when a worker is to start on them."""

    foreign: Annotated[
        Literal["refuse", "warn"],
        _d("A worker's GPU whose memory others hold: `refuse` does not start it, `warn` does and names them."),
    ] = "refuse"
    min_free: Annotated[
        float, Meta(gt=0, le=1), _d("Share of a GPU's memory that must be free before a worker starts on it.")
    ] = 0.9
    wait_s: Annotated[float, Meta(ge=0), _d("How long that is waited for.")] = 60.0


class _Engines(msgspec.Struct, frozen=True):
    gpus_per_engine: int | None = None
    groups: "list[_Engines]" = []

    @property
    def on_gpus(self) -> bool:
        return bool(self.gpus_per_engine) or any(group.on_gpus for group in self.groups)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Those tables of the schema that say how a node is to be used; the hub has checked the others."""

    cluster: ClusterConfig = ClusterConfig()
    logs: LogsConfig = LogsConfig()
    network: NetworkConfig = NetworkConfig()
    gpu: GpuConfig = GpuConfig()
    timing: Timing = Timing()
    inference: _Engines = _Engines()
    models: dict[str, _Engines] = {}

    @property
    def wants_gpus(self) -> bool:
        """Some pool of the run needs GPUs."""
        return self.inference.on_gpus or any(model.on_gpus for model in self.models.values())


def read_node_config(run_dir: Path) -> NodeConfig:
    """What the config of a run directory says about nodes.

    Raises:
        ConfigError: when the file is missing or was not written by this version of the schema.
    """
    path = run_dir / RESOLVED
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), NodeConfig)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: not found: {run_dir} is not a run directory") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}: resolve the run again with `miles-hpc run … --resume`") from error
