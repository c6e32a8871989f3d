"""The import contract: packages import from those below them, and heavy libraries stay in their rooms."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).parents[3] / "miles_hpc"

# From the top of the house to its cellar.
LAYERS = [
    "cli",
    "postmortem",
    "train",
    "rollout",
    "session",
    "inference",
    "engine",
    "launch",
    "hub",
    "agent",
    "specs",
    "transport",
    "wire",
    "config",
]
# Library -> rooms that may import it, at any depth of a module.
ROOMS_OF_LIBRARY = {
    "torch": {"train", "engine"},
    "transformers": {"train", "engine"},
    "submitit": {"launch"},
    "rich": {"cli"},
    "matplotlib": {"postmortem"},
    # aiohttp's, on Python 3.10: a cancellation that comes with the end of the time is lost there.
    "async_timeout": set(),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            found.add(node.module)
            if node.module == "miles_hpc":
                found.update(f"miles_hpc.{alias.name}" for alias in node.names)
    return found


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else ""


def test_every_room_of_the_house_is_named_here():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("__pycache__", "recipes")}
    assert rooms == set(LAYERS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_room_and_those_below(path):
    room = room_of(path)
    if not room or room == "recipes":
        return
    allowed = set(LAYERS[LAYERS.index(room) :])
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "miles_hpc" and len(parts) > 1 and parts[1] in LAYERS:
            assert parts[1] in allowed, f"{room} must not import {name}: it lies above"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_their_rooms(path):
    for name in imports(path):
        rooms = ROOMS_OF_LIBRARY.get(name.split(".")[0])
        assert rooms is None or room_of(path) in rooms, f"{path}: {name} belongs to {sorted(rooms or ())}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_waits_with_asyncio_s_own_time_limits(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncio":
            limits = {"wait_for", "timeout", "timeout_at"}
            assert node.attr not in limits, f"{path}:{node.lineno}: wire/time_limit.py has `within`, and says why"
