"""Each module imports alone and in either order with its neighbours, and the light programs stay light."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PACKAGE = Path(__file__).parents[3] / "miles_hpc"

# Other people's libraries are the same in every case: they are loaded once, and each case is a fork of that.
FORKER = """
import importlib, json, os, sys
asked = json.load(sys.stdin)
for name in asked["libraries"]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
assert not [name for name in sys.modules if name.split(".")[0] == "miles_hpc"]
failed = {}
for case in asked["cases"]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for name in case:
                importlib.import_module(name)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    if said:
        failed[" then ".join(case)] = said
json.dump(failed, sys.stdout)
"""

LIBRARIES = [
    *("aiohttp", "asyncio", "jinja2", "jinja2.sandbox", "msgspec", "numpy", "psutil", "rich.live", "rich.table"),
    *("safetensors", "safetensors.torch", "tokenizers", "tomli_w", "torch", "torch.distributed", "transformers", "zmq"),
]

LIGHT = {
    "miles_hpc.agent.run": {"torch", "transformers", "submitit", "aiohttp", "numpy", "rich"},
    "miles_hpc.hub.run": {
        "torch",
        "transformers",
        "submitit",
        "aiohttp",
        "numpy",
        "rich",
        "http.server",
        "prometheus_client",
    },
    "miles_hpc.cli.main": {"torch", "transformers", "submitit", "aiohttp", "numpy", "rich", "matplotlib", "zmq"},
    "miles_hpc.rollout.run_worker": {"torch", "transformers", "submitit", "rich", "pyarrow", "matplotlib"},
    "miles_hpc.rollout.run_executor": {"torch", "transformers", "submitit", "rich", "pyarrow", "matplotlib"},
    "miles_hpc.inference.run_controller": {"torch", "transformers", "submitit", "rich", "pyarrow", "matplotlib"},
    "miles_hpc.session.serve": {"torch", "transformers", "submitit", "rich", "pyarrow", "matplotlib"},
    "miles_hpc.engine.fake": {"torch", "transformers", "submitit", "numpy", "rich", "pyarrow"},
    "miles_hpc.train.run_driver": {"torch", "transformers", "submitit", "rich", "pyarrow", "matplotlib"},
    "miles_hpc.train.run_trainer": {"torch", "transformers", "submitit", "rich", "pyarrow", "matplotlib"},
}


def all_modules() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def import_cases(cases: list[list[str]]) -> dict[str, str]:
    asked = json.dumps({"libraries": LIBRARIES, "cases": cases})
    done = subprocess.run([sys.executable, "-c", FORKER], input=asked, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_imports_alone():
    assert import_cases([[name] for name in all_modules()]) == {}


def test_neighbours_in_one_room_import_in_either_order():
    light = [name for name in all_modules() if ".embedded" not in name and "torch" not in name]
    cases = []
    for first, second in itertools.pairwise(light):
        if first.split(".")[:2] == second.split(".")[:2]:
            cases += [[first, second], [second, first]]
    assert import_cases(cases) == {}


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_a_light_program_does_not_load_heavy_libraries(module):
    code = f"import sys, {module}; print('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & LIGHT[module]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="msgspec needs typing_extensions there")
@pytest.mark.parametrize(
    "modules",
    [
        "miles_hpc.agent.run, miles_hpc.agent.agent",
        "miles_hpc.cli.hub",
        "miles_hpc.wire.lean, miles_hpc.cli.run, miles_hpc.launch.local",
    ],
    ids=["agent", "hub", "command"],
)
def test_agent_hub_and_the_command_that_starts_them_load_neither_compiler_nor_ctypes(modules):
    code = f"import sys, {modules}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"typing_extensions", "inspect", "ast", "dis", "dataclasses", "ctypes"} & set(done.stdout.split())


def test_the_hub_loads_no_archivers():
    code = "import sys, miles_hpc.cli.hub; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"shutil", "bz2", "lzma", "tempfile"} & set(done.stdout.split())


def test_typing_extensions_can_be_imported_after_a_lean_start():
    code = "import miles_hpc.wire.lean, typing_extensions; print(typing_extensions.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "typing_extensions"


def test_the_warden_loads_hardly_anything():
    code = f"import sys; sys.path.append({str(PACKAGE.parent)!r}); import miles_hpc.agent.warden; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(done.stdout.split())
    assert "miles_hpc.agent.procfs" in loaded
    assert not {"signal", "enum", "collections", "contextlib", "functools", "re", "typing", "ctypes", "types"} & loaded
