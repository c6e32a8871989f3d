"""What an installed SGLang and router can do: looked up in their own code, in their runtime, and never guessed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable

from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import Loaded
from miles_hpc.config.schema import Config
from miles_hpc.inference.needs import NEEDED_CALLS
from miles_hpc.specs.base import LaunchCommandContext
from miles_hpc.specs.models import served_models
from miles_hpc.specs.router import router_specs
from miles_hpc.specs.runtime import python_of
from miles_hpc.wire.address import HostAndPort

_TIMEOUT_S = 300.0
_NEWEST_KNOWN = {"sglang": "0.5.23", "sglang_router": "0.3.2"}
# Run in the interpreter of a runtime: which words are in none of a package's files? Reading costs a tenth of a second,
# and importing SGLang tens of seconds. A package without such files (a layout of its own) says nothing.
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, sys
package, patterns, words = sys.argv[1], *map(json.loads, sys.argv[2:4])
roots = [pathlib.Path(place) for place in importlib.util.find_spec(package).submodule_search_locations]
text = "".join(path.read_text(errors="replace") for root in roots for one in patterns for path in root.glob(one))
try:
    version = importlib.metadata.version(package.replace("_", "-"))
except importlib.metadata.PackageNotFoundError:
    version = ""
print(json.dumps([version, [word for word in words if text and word not in text]]))
"""


def check_capabilities(loaded: Loaded) -> None:
    """Refuse a real SGLang or router that lacks what is used of it.

    Raises:
        ConfigError: one line with what is missing.
    """
    config = loaded.config
    if config.rollout.load_debug:
        return
    if config.inference.engine == "sglang" and any(model.groups for model in served_models(config)):
        calls = [f'"{call}"' for call in NEEDED_CALLS]
        _require(
            loaded,
            ("engine", "inference.engine", "sglang"),
            ["srt/entrypoints/**/*.py", "srt/managers/*.py"],
            [*calls, "weight_versions"],
        )
    _require(loaded, ("router", "inference.router_policy", "sglang_router"), ["**/*.py"], _router_flags(config))


def _router_flags(config: Config) -> list[str]:
    address = HostAndPort("127.0.0.1", 1)
    context = LaunchCommandContext(
        cell_index=0,
        worker_index=0,
        local_gpu_ids=(),
        self_addrs={"http": address, "prometheus": address},
        cell_addrs=(),
        pool_addrs={},
        run_dir="",
        attempt=0,
    )
    words = router_specs(config)[0].launch_command(context)
    return [word.removeprefix("--") for word in words if word.startswith("--")]


def _require(loaded: Loaded, what: tuple[str, str, str], patterns: list[str], words: Iterable[str]) -> None:
    kind, key, package = what
    python = python_of(loaded.config, kind)
    done = subprocess.run(
        [python, "-c", _PROBE, package, json.dumps(patterns), json.dumps(list(words))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{loaded.origin([key])}: {key}: {python} cannot say what its {package} can do: {last}")
    version, missing = json.loads(done.stdout)
    if missing:
        lacks = ", ".join(word.strip('"') for word in missing[:4]) + (" …" if len(missing) > 4 else "")
        raise ConfigError(
            f"{loaded.origin([key])}: {key}: {package} {version or '(of unknown version)'} of {python} is too old: it "
            f"lacks {lacks}; {_NEWEST_KNOWN[package]} has all that is used: upgrade it, or set runtimes.{kind}.python"
        )
