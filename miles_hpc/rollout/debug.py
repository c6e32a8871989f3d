"""Saved rollouts: `<run_dir>/rollouts/<id>.parcel`, to look at, and to train on again without engines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from miles_hpc.rollout.data import DataState
from miles_hpc.rollout.groups import Gathered, groups_of
from miles_hpc.rollout.producer import Produced
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.transport.batch import KIND, RolloutBatch
from miles_hpc.transport.carriers import map_parcel, write_parcel
from miles_hpc.transport.columns import SchemaError
from miles_hpc.transport.parcel import Packing, read_parcel


class SavedRolloutError(Exception):
    """A saved rollout cannot be read; one line with the file and what to do."""


class SavedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """The `meta` of a saved rollout."""

    rollout_id: int
    weight_version: int
    specs: list[GroupSpec]
    sizes: list[int]
    """Samples of each group."""
    place: DataState
    stats: list[dict[str, float]] = []
    """What was counted of each group; see `statistics`."""


def rollout_file(directory: Path, rollout_id: int) -> Path:
    """Where a rollout is saved."""
    return directory / f"{rollout_id:05d}.parcel"


def save_rollout(directory: Path, rollout_id: int, weight_version: int, produced: Produced) -> Path:
    """Write a rollout; whoever sees the file sees all of it."""
    directory.mkdir(parents=True, exist_ok=True)
    saved = SavedRollout(
        rollout_id=rollout_id,
        weight_version=weight_version,
        specs=produced.specs,
        sizes=[len(group) for group in produced.groups],
        place=produced.place,
        stats=[dict(group.stats) for group in produced.groups],
    )
    columns = RolloutBatch.concat(Gathered.of(produced.groups).batches).columns()
    path = rollout_file(directory, rollout_id)
    write_parcel(path, Packing(KIND, columns, msgspec.to_builtins(saved)))
    return path


def read_rollout(path: Path) -> tuple[SavedRollout, RolloutBatch]:
    """A saved rollout, mapped from its file.

    Raises:
        SavedRolloutError: there is no such file, or it holds something else.
    """
    try:
        memory = map_parcel(path)
        _, meta = read_parcel(KIND, memory)
        return msgspec.convert(meta, SavedRollout), RolloutBatch.from_parcel(memory)
    except (OSError, ValueError) as error:
        kind = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise SavedRolloutError(
            f"{path}: not a saved rollout ({kind}); a run with rollout.save_debug = true writes them to "
            f"<run_dir>/rollouts/"
        ) from error


def load_rollout(directory: Path, rollout_id: int) -> tuple[Produced, int]:
    """A rollout to train on, and the weight version that it was generated with.

    Raises:
        SavedRolloutError: see `read_rollout`.
    """
    saved, whole = read_rollout(rollout_file(directory, rollout_id))
    try:
        groups = groups_of(whole, saved.sizes)
    except SchemaError as error:
        raise SavedRolloutError(f"{directory}: rollout {rollout_id}: {error}") from error
    for group, stats in zip(groups, saved.stats, strict=False):
        group.stats = stats
    return Produced(specs=saved.specs, groups=groups, place=saved.place, metrics={}), saved.weight_version
