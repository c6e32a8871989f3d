"""A trainer that learns nothing: its weights are a hash of every batch that it saw. For tests; imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from miles_hpc.rollout.commits import ManifestFile
from miles_hpc.train.hf_files import copy_model_files
from miles_hpc.train.trainer import CheckpointRef, Trainer, manifest_of, sync_tree

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch


class HashState(msgspec.Struct, frozen=True):
    """What a checkpoint of a rank holds."""

    digest: str
    batches: int


class HashTrainer(Trainer):
    """Ranks never meet: each hashes its own shards, and a resumed one goes on with the hash of its checkpoint."""

    def init(self, resume: CheckpointRef | None) -> None:
        self._state = HashState("", 0)
        if resume is not None:
            self._state = msgspec.json.decode(resume.checked(self._file).read_bytes(), type=HashState)

    @property
    def _file(self) -> str:
        return f"state-{self.rank:05d}.json"

    @property
    def state(self) -> HashState:
        """Hash of all shards so far, and how many."""
        return self._state

    def warm_start(self) -> dict[str, float]:
        return {}

    def train(self, batch: TrainBatch) -> dict[str, float]:
        digest = hashlib.sha256(self._state.digest.encode())
        # Log-probs are left out: they may differ in the last bits between engines, tokens and rewards may not.
        for column in (batch.offsets, batch.token_ids, batch.response_mask, batch.rewards, batch.advantages):
            digest.update(column.tobytes())
        self._state = HashState(digest.hexdigest(), self._state.batches + 1)
        return {"loss": 0.0, "grad_norm": 0.0}

    def save(self, path: Path) -> list[ManifestFile]:
        target = path / self._file
        target.write_bytes(msgspec.json.encode(self._state))
        return manifest_of(path, [target])

    def export_weights(self, path: Path) -> None:
        if self.rank:
            return
        path.mkdir()
        copy_model_files(Path(self.config.model.path), path, self.config.model.chat_template)
        (path / "weights.json").write_text(json.dumps(msgspec.to_builtins(self._state)), encoding="utf-8")
        sync_tree(path)

    def close(self) -> None:
        pass
