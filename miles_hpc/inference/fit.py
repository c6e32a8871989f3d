"""Whether weights fit a model, by the headers of their files, before an engine meets them.

The real SGLang does not refuse a tensor of another shape: its scheduler ends, and the engine with it (seen).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_hpc.inference.engine_api import EngineApi, EngineRefused

_LONGEST_HEADER = 100 << 20
_NAMED = 3
"""Tensors that a reason names."""
_UNREADABLE = (OSError, ValueError, struct.error, KeyError, TypeError, IndexError, AttributeError)
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Name and shape of every tensor in a directory's safetensors files; None when that cannot be told."""
    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            found.update({name: tuple(one["shape"]) for name, one in _header(path)[0].items()})
    except _UNREADABLE:
        return None
    return found or None


def damage(directory: Path) -> str:
    """What is wrong with a directory's weights by its index and the headers and sizes of its safetensors files; empty
    when nothing is seen.

    Of files that an index names, only those matter: engines load no others. A directory without safetensors files has
    its weights in another form, whatever index was left in it.
    """
    files = sorted(directory.glob("*.safetensors"))
    form = "model.safetensors" if files else "pytorch_model.bin"
    named = _named_in(directory / f"{form}.index.json")
    if missing := sorted(name for name in named if not (directory / name).is_file()):
        return f"{', '.join(missing[:_NAMED])} of its index is missing: copy it there"
    for path in files:
        if named and path.name not in named:
            continue
        try:
            tensors, start = _header(path)
            expected = start + max((one["data_offsets"][1] for one in tensors.values()), default=0)
            size = path.stat().st_size
        except _UNREADABLE:
            return f"{path.name} has no header that can be read: it was cut off, or is no safetensors file"
        if size != expected:
            return f"{path.name} has {size} bytes where its header says {expected}: it was cut off, copy it again"
    return ""


def _named_in(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except _UNREADABLE:
        return set()


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file describes, and where their bytes begin. Raises what `_UNREADABLE` holds."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(min(length, _LONGEST_HEADER)))
    header.pop("__metadata__", None)
    return header, 8 + length


def misfit(known: Shapes, given: Shapes) -> str:
    """Why weights do not fit a model that has `known`; empty when they may.

    Names alone are no fault: tied tensors are left out of one file and not of the other, and quantized ones have more.
    Both unknown and missing ones together are weights under other names.
    """
    wrong = [
        f"{name} has shape {list(given[name])} and should have {list(shape)}"
        for name, shape in known.items()
        if name in given and given[name] != shape
    ]
    unknown, missing = sorted(given.keys() - known.keys()), sorted(known.keys() - given.keys())
    if not wrong and unknown and missing:
        wrong = [f"{name} is unknown" for name in unknown] + [f"{name} is missing" for name in missing]
    return "; ".join(wrong[:_NAMED]) + (f" (and {len(wrong) - _NAMED} more)" if len(wrong) > _NAMED else "")


async def refuse_misfit(engine: EngineApi, given: Shapes | None, what: str) -> None:
    """Ask the engine what it serves, and compare where those files can be read here.

    Raises:
        EngineRefused: when they do not fit; the engine was told nothing.
    """
    if given is None:
        return
    served = str((await engine.model_info()).get("model_path") or "")
    known = await asyncio.to_thread(shapes_of, Path(served)) if served else None
    if known is not None and (why := misfit(known, given)):
        raise EngineRefused(f"{engine.url}: {what} do not fit the model: {why}", 0, why)
