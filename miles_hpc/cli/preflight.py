"""Every bad input that can be seen before anything is started, each as one line with file, key and remedy."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from miles_hpc.cli.capabilities import check_capabilities
from miles_hpc.cli.exits import one_line
from miles_hpc.config.check import check
from miles_hpc.config.errors import ConfigError, ConflictError
from miles_hpc.config.load import Loaded, load_with_origins
from miles_hpc.config.schema import Config
from miles_hpc.launch.attempts import holds_run
from miles_hpc.specs.models import served_models
from miles_hpc.specs.runtime import own_env, python_of
from miles_hpc.wire.security import SecurityError, read_engine_key

_IMPORT_TIMEOUT_S = 300.0
_EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "sglang": "sglang",
    "sglang_router": "router",
    "math_verify": "rewards",
    "reasoning_gym": "gym",
}
# Run in the interpreter of a runtime: which of these packages are missing there?
_MISSING = (
    "import importlib.util, json, sys\n"
    "print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))"
)
# Run in the interpreter of a runtime: import `module:name`, and say in one line why not.
_IMPORT = (
    "import importlib, sys\n"
    "module, _, name = sys.argv[1].partition(':')\n"
    "try:\n"
    "    found = importlib.import_module(module)\n"
    "    for part in name.split('.'):\n"
    "        found = getattr(found, part)\n"
    "except BaseException as error:\n"
    "    sys.exit(f'{type(error).__name__}: {error}')\n"
    "if not callable(found):\n"
    "    sys.exit(f'{sys.argv[1]} is a {type(found).__name__}, not something to call')\n"
)


def resolve(files: list[str], sets: list[str]) -> Loaded:
    """Compose run files and refuse values that do not fit together.

    Raises:
        ConfigError: one line that names the file, the key and the remedy.
    """
    loaded = load_with_origins(files, sets)
    try:
        check(loaded.config)
    except ConflictError as error:
        raise ConfigError(f"{loaded.origin(error.keys)}: {error}") from error
    return loaded


def preflight(loaded: Loaded, *, elsewhere: bool = False) -> list[str]:
    """Look at everything that the run will need on this machine, and start nothing.

    Args:
        elsewhere: the run will be on other machines, which share this one's files: nothing is said about its ports,
            nor, with a container, about its programs.

    Returns:
        Notes for the user that stop nothing.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    config = loaded.config
    _check_prompts(loaded)
    _check_model(loaded)
    _check_other_models(loaded)
    _check_engine_keys(loaded)
    if not (elsewhere and config.slurm.container is not None):
        _check_interpreters(loaded)
        _check_packages(loaded)
        check_capabilities(loaded)
        _check_dotted_paths(loaded)
    if not elsewhere:
        _check_ports(loaded)
    return list(_notes(config))


def _check_prompts(loaded: Loaded) -> None:
    from miles_hpc.cli.prompts import check_rows, check_saved
    from miles_hpc.rollout.data import Keys, keys_of

    config = loaded.config
    data = config.data
    files = [("data.prompts", data.prompts), ("data.heldout", data.heldout)]
    files += [(f"eval.datasets.{name}.data", one.data) for name, one in config.eval.datasets.items()]
    for key, text in files:
        if text or key.startswith("eval."):
            check_rows(loaded.origin([key]), key, text, keys_of(data))
    if config.rollout.load_debug:
        check_saved(loaded.origin(["rollout.load_debug"]), Path(config.rollout.load_debug))
    warm = config.train.warm_start
    if warm is not None:
        check_rows(
            loaded.origin(["train.warm_start.data"]),
            "train.warm_start.data",
            warm.data,
            Keys(prompt=warm.prompt_key, label=warm.answer_key, metadata=""),
            {"data.prompt_key": "train.warm_start.prompt_key", "data.label_key": "train.warm_start.answer_key"},
        )


def _check_model(loaded: Loaded) -> None:
    model = loaded.config.model
    if model.chat_template and not Path(model.chat_template).is_file():
        where = loaded.origin(["model.chat_template"])
        raise ConfigError(
            f"{where}: model.chat_template = {model.chat_template!r}: no such file: "
            "name a jinja template, or leave the key out to use the tokenizer's own"
        )
    if model.path:
        _check_model_dir(loaded, "model.path", model.path, model.chat_template)


def _check_other_models(loaded: Loaded) -> None:
    for name, model in loaded.config.models.items():
        _check_model_dir(loaded, f"models.{name}.path", model.path, model.chat_template)


def _check_model_dir(loaded: Loaded, key: str, text: str, chat_template: str) -> None:
    start = f"{loaded.origin([key])}: {key} = {text!r}"
    path = Path(text)
    if not path.is_dir():
        raise ConfigError(
            f"{start}: no such directory: download the model first and name its directory"
            + (", or use [model.make]" if key == "model.path" else "")
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{start}: holds no config.json: name a HF model directory")
    from miles_hpc.engine.chat_tokenizer import ChatTokenizer, ModelDirError

    try:
        ChatTokenizer(path, chat_template, require_template=key == "model.path")
    except ModelDirError as error:
        raise ConfigError(f"{start}: {error}") from error
    if loaded.config.inference.engine == "fake":
        return
    if not any(path.glob("*.safetensors")) | any(path.glob("*.bin")):
        raise ConfigError(f"{start}: holds no weights (*.safetensors): copy them there")
    from miles_hpc.inference.fit import damage

    if found := damage(path):
        raise ConfigError(f"{start}: {found}")


def _check_engine_keys(loaded: Loaded) -> None:
    config = loaded.config
    tables = {"inference": config.inference.external, **{f"models.{n}": m.external for n, m in config.models.items()}}
    for where, engines in tables.items():
        for name, engine in engines.items():
            key = f"{where}.external.{name}.key_file"
            try:
                if engine.key_file:
                    read_engine_key(Path(engine.key_file))
            except SecurityError as error:
                raise ConfigError(f"{loaded.origin([key])}: {key}: {error}") from error


def _check_interpreters(loaded: Loaded) -> None:
    for kind, runtime in loaded.config.runtimes.items():
        python = runtime.python
        if python and not os.access(shutil.which(python) or "", os.X_OK):
            key = f"runtimes.{kind}.python"
            raise ConfigError(
                f"{loaded.origin([key])}: {key} = {python!r}: no such program: name the interpreter of that environment"
            )


def _check_packages(loaded: Loaded) -> None:
    missing: dict[str, set[str]] = {}
    asked = list(_asked(loaded.config))
    for python in {python_of(loaded.config, kind) for kind, _, _, _ in asked}:
        names = sorted({name for kind, name, _, _ in asked if python_of(loaded.config, kind) == python})
        missing[python] = _missing_in(python, names)
    for kind, name, key, remedy in asked:
        python = python_of(loaded.config, kind)
        if name in missing[python]:
            extra = f": pip install 'miles-hpc[{_EXTRAS[name]}]'" if name in _EXTRAS else ": install miles-hpc there"
            raise ConfigError(
                f"{loaded.origin([key])}: {key} needs the package {name}, which {python} does not have{extra}{remedy}"
            )


def _asked(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """(runtime kind, package, key that asks for it, another remedy)."""
    asks = not config.rollout.load_debug
    starts_engines = asks and any(model.groups for model in served_models(config))
    if asks:
        yield "router", "sglang_router", "inference.router_policy", ", or set runtimes.router.python"
    engine = f"inference.engine = {config.inference.engine!r}"
    if config.inference.engine == "embedded" and starts_engines:
        for name in ("torch", "transformers"):
            yield "engine", name, "inference.engine", f" ({engine}), or set runtimes.engine.python"
    if config.inference.engine == "sglang" and starts_engines:
        yield "engine", "sglang", "inference.engine", f" ({engine}), or set runtimes.engine.python"
    if config.train.trainer == "torch" and config.mode in ("sync", "async"):
        for name in ("torch", "transformers"):
            yield "trainer", name, "train.trainer", ", or set runtimes.trainer.python"
    if config.reward.function == "math_verify":
        yield "rollout-worker", "math_verify", "reward.function", ", or choose another reward"
    if config.data.reasoning_gym is not None:
        for pool in ("executor", "rollout-worker"):
            yield pool, "reasoning_gym", "data.reasoning_gym", ""
    ours = ["session-server", "controller", "rollout-worker", "executor", "trainer", "driver"]
    if config.inference.engine != "sglang":
        ours.append("engine")
    for kind in ours:
        if python_of(config, kind) != sys.executable:
            key = f"runtimes.{kind if kind in config.runtimes else 'default'}.python"
            yield kind, "miles_hpc", key, ""


def _missing_in(python: str, names: list[str]) -> set[str]:
    if python == sys.executable:
        return {name for name in names if importlib.util.find_spec(name) is None}
    done = subprocess.run(
        [python, "-c", _MISSING, *names],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        check=False,
    )
    return set(json.loads(done.stdout)) if done.returncode == 0 else set(names)


def _check_dotted_paths(loaded: Loaded) -> None:
    config = loaded.config
    evaluated = config.eval.datasets.items()
    for key, value, kind in (
        ("reward.function", config.reward.function, "rollout-worker"),
        ("rollout.generate", config.rollout.generate, "rollout-worker"),
        ("rollout.tools", config.rollout.tools, "rollout-worker"),
        *(("rollout.filters", path, "rollout-worker") for path in config.rollout.filters),
        *((f"eval.datasets.{name}.generate", one.generate, "rollout-worker") for name, one in evaluated),
        ("data.source", config.data.source, "executor"),
        ("train.trainer", config.train.trainer, "trainer"),
    ):
        if ":" not in value:
            continue
        start = f"{loaded.origin([key])}: {key} = {value!r}"
        try:
            # In a process of its own, as it will be imported later: what a user's module does stays there.
            done = subprocess.run(
                [python_of(config, kind), "-c", _IMPORT, value],
                env={**os.environ, **own_env(config, kind)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_IMPORT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{start}: its import took more than {_IMPORT_TIMEOUT_S:g} s: move slow work out of the module"
            ) from error
        if done.returncode:
            reason = one_line((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
            raise ConfigError(
                f"{start}: does not import ({reason}): correct the module:function, or add its directory to python_path"
            )


def _check_ports(loaded: Loaded) -> None:
    config = loaded.config
    ports = [("inference.router_port", config.inference.router_port)] if config.inference.router_port else []
    if config.session.port:
        ports += [("session.port", config.session.port + index) for index in range(config.session.servers)]
    for key, port in ports:
        if holder := port_holder(port):
            raise ConfigError(
                f"{loaded.origin([key])}: {key}: port {port} is in use by {holder}: "
                "stop that program, choose another port, or set 0 for a free one"
            )


def port_holder(port: int) -> str:
    """Who listens on a TCP port of this machine, on any address; empty when it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            return ""
        except PermissionError:
            return f"the system (ports below {_first_free_port()} need rights)"
        except OSError:
            return _holder(port)


def _first_free_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


def _holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return one_line(f"pid {connection.pid} ({command[:120]})")
    except psutil.Error:
        pass
    return "another program"


def _notes(config: Config) -> Iterator[str]:
    if config.inference.external:
        count = len(config.inference.external)
        yield f"inference.external names {count} engines of somebody else: they are neither started nor stopped"
    elif config.inference.engine == "embedded":
        yield (
            "inference.engine = embedded: tokens come from the embedded CPU engine, made for small models; "
            'with GPUs, set inference.engine = "sglang"'
        )
    elif config.inference.engine == "fake":
        yield "inference.engine = fake: tokens are scripted; this run tests the machinery and learns nothing"
    for wanted, name in (
        (config.tracking.tensorboard, "tensorboard"),
        (bool(config.tracking.wandb_project), "wandb"),
        (True, "matplotlib"),
    ):
        if wanted and importlib.util.find_spec(name) is None:
            extra = "report" if name == "matplotlib" else "tracking"
            lost = "the report has no picture" if name == "matplotlib" else f"nothing is sent to {name}"
            yield f"the package {name} is missing: {lost} (pip install 'miles-hpc[{extra}]')"


def claim_run_dir(run_dir: Path, *, resume: bool) -> bool:
    """Make the run directory, or see that it can be used. True when it was made here.

    Raises:
        ConfigError: when it cannot be written, holds something else, or holds a run and `resume` is off.
    """
    start = f"--run-dir {str(run_dir)!r}"
    found = holds_run(run_dir)
    if found and not resume:
        raise ConfigError(f"{start}: holds a run already: add --resume to continue it, or choose another directory")
    if resume and not found:
        raise ConfigError(f"{start}: holds no run to resume: drop --resume, or name the directory of a run")
    made = not run_dir.is_dir()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{start}: cannot be written ({error.strerror}): choose a directory that you may write to"
        ) from error
    return made
