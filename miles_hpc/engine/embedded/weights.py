"""Replacing a served model's weights by those of another directory: all of them, or none."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


class WeightsError(ValueError):
    """A directory does not hold weights that fit the served model; nothing was changed."""


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a HF model directory.

    Raises:
        WeightsError: when there is no such directory or file.
    """
    if not path.is_dir():
        raise WeightsError(f"Failed to get weights iterator: no directory {path}.")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} is not a weight index: {error}.") from error
        files = [path / name for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = ", ".join(missing) if missing else "no *.safetensors file"
        raise WeightsError(f"Failed to get weights iterator: {path} lacks its weights ({what}).")
    return files


def checkpoint_names(path: Path) -> set[str]:
    """Names of the tensors in a directory, without reading them; raises WeightsError."""
    names: set[str] = set()
    for file in checkpoint_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                names |= set(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} is not readable: {error}.") from error
    return names


def replace_weights(model: torch.nn.Module, path: Path) -> None:
    """Copy the tensors of a HF directory into `model`, whose parameter names they must have.

    All tensors are read and checked first, so a bad directory leaves the model as it was.

    Raises:
        WeightsError: with the names or shapes that do not fit.
    """
    targets = dict(model.state_dict(keep_vars=True))
    found: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    found[name] = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} is not readable: {error}.") from error
    given = {targets[name].data_ptr() for name in found.keys() & targets.keys()}
    # Tied tensors (embedding and head) share storage; a checkpoint holds at least one of their names.
    missing = sorted(name for name, tensor in targets.items() if tensor.data_ptr() not in given)
    _check(targets, found, f"Weights of {path}", missing)
    with torch.no_grad():
        for name, tensor in found.items():
            targets[name].copy_(tensor)


def take_weights(model: torch.nn.Module, found: dict[str, torch.Tensor]) -> None:
    """Copy tensors into `model`, all or none; those that are not given stay.

    Raises:
        WeightsError: with the names or shapes that do not fit.
    """
    targets = dict(model.state_dict(keep_vars=True))
    _check(targets, found, "Weights that were sent", [])
    with torch.no_grad():
        for name, tensor in found.items():
            targets[name].copy_(tensor)


def _check(targets: dict[str, torch.Tensor], found: dict[str, torch.Tensor], what: str, missing: list[str]) -> None:
    unexpected = sorted(found.keys() - targets.keys())
    if unexpected or missing:
        raise WeightsError(
            f"{what} do not fit the model: {_some('missing', missing)}{_some('unexpected', unexpected)}"
            "names must be those that are served."
        )
    for name, tensor in found.items():
        if tensor.shape != targets[name].shape:
            raise WeightsError(
                f"{what} do not fit the model: {name} has shape {list(tensor.shape)}, "
                f"expected {list(targets[name].shape)}."
            )


def _some(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{kind} {', '.join(names[:3])}{more}; "
