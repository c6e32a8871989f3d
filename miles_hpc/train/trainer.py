"""What a trainer is: one object per rank, driven by calls that all ranks get at the same time."""

from __future__ import annotations

import abc
import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from miles_hpc.config.schema import Config
from miles_hpc.rollout.commits import CheckpointManifest, ManifestFile

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch
    from miles_hpc.wire.worker_env import WorkerEnv

_CHUNK = 1 << 20


class TrainerError(Exception):
    """A trainer cannot do what it was asked; the text says why and what to do."""


class CheckpointDamaged(TrainerError):
    """A file of a checkpoint is missing or is not what its manifest says."""


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint to go on from. `path` is absolute."""

    path: str
    step: int
    files: list[ManifestFile]

    @classmethod
    def of(cls, manifest: CheckpointManifest, run_dir: Path) -> CheckpointRef:
        """The checkpoint of a commit."""
        return cls(path=str(run_dir / manifest.path), step=manifest.step, files=manifest.files)

    def checked(self, name: str) -> Path:
        """The path of one file, after its size and hash were compared with the manifest.

        Raises:
            CheckpointDamaged: it is not in the manifest, missing, or different.
        """
        path = Path(self.path) / name
        for entry in self.files:
            if entry.file == name:
                break
        else:
            raise CheckpointDamaged(
                f"{path}: not in the checkpoint's manifest; was train.ranks or train.kl_coef changed?"
            )
        if not path.is_file() or path.stat().st_size != entry.size or file_hash(path) != entry.sha256:
            raise CheckpointDamaged(
                f"{path}: missing, or not the {entry.size} bytes that were committed; restore it from a copy of the run"
            )
        return path


class Trainer(abc.ABC):
    """One rank of a data-parallel trainer. Methods are called in one thread, at the same time on all ranks.

    Args:
        config: the run.
        env: this worker.
        rank, world: place in the group, and its size.
    """

    def __init__(self, config: Config, env: WorkerEnv, rank: int, world: int) -> None:
        self.config = config
        self.env = env
        self.rank = rank
        self.world = world

    @abc.abstractmethod
    def init(self, resume: CheckpointRef | None) -> None:
        """Load the start model, or the checkpoint; join the group. May be called again, to go back to a checkpoint.

        Raises:
            CheckpointDamaged: a file is missing or different.
        """

    @abc.abstractmethod
    def warm_start(self) -> dict[str, float]:
        """Supervised steps as `train.warm_start` says; returns metrics, the same on each rank."""

    @abc.abstractmethod
    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Learn from this rank's shard; returns metrics of the whole batch, the same on each rank."""

    @abc.abstractmethod
    def save(self, path: Path) -> list[ManifestFile]:
        """Write this rank's files of a checkpoint into the existing directory `path`, synced."""

    @abc.abstractmethod
    def export_weights(self, path: Path) -> None:
        """Rank 0 writes an HF model directory that engines load, synced."""

    def weights(self) -> Mapping[str, Any]:
        """Rank 0's tensors under the names of an HF checkpoint, for a broadcast to engines.

        Raises:
            TrainerError: this trainer does not send its weights.
        """
        raise TrainerError(f'{type(self).__name__} does not send its weights: set train.weight_transfer = "disk"')

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group."""


def make_trainer(config: Config, env: WorkerEnv, rank: int, world: int) -> Trainer:
    """The trainer that `train.trainer` names.

    Raises:
        TrainerError: its module does not import, or holds no such trainer class.
    """
    name = config.train.trainer
    dotted = {
        "torch": "miles_hpc.train.torch_trainer:TorchTrainer",
        "hash": "miles_hpc.train.hash_trainer:HashTrainer",
    }.get(name, name)
    module, _, attribute = dotted.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        extra = "; install the extra: pip install 'miles-hpc[train]'" if name == "torch" else ""
        raise TrainerError(f"train.trainer = {name!r} does not import: {error}{extra}") from error
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise TrainerError(f"train.trainer = {name!r} is no subclass of miles_hpc.train.trainer.Trainer")
    return found(config, env, rank, world)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Bring a written file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Bring every file below `path`, and the directories that name them, to the disk."""
    for entry in sorted(path.rglob("*"), reverse=True):
        sync_file(entry)
    sync_file(path)


def manifest_of(directory: Path, files: list[Path]) -> list[ManifestFile]:
    """Sync the files, then describe them as they are on disk."""
    for path in files:
        sync_file(path)
    sync_file(directory)
    return [
        ManifestFile(file=str(path.relative_to(directory)), size=path.stat().st_size, sha256=file_hash(path))
        for path in files
    ]
