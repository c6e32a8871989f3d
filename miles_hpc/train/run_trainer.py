"""One rank of the trainer: `python -m miles_hpc.train.run_trainer`, started by an agent. The driver calls it."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.config.load import read_resolved
from miles_hpc.inference.windows import EngineInfo
from miles_hpc.rollout.client import BatchReader
from miles_hpc.train.trainer import CheckpointRef, Trainer, make_trainer
from miles_hpc.wire.client import HubClient
from miles_hpc.wire.program import setup_logging
from miles_hpc.wire.rpc import RpcThreadServer
from miles_hpc.wire.worker_env import WorkerEnv

log = logging.getLogger(__name__)

BATCH_S = 600.0
"""Until a rank has its shard of a rollout that the driver says is finished."""


class RankService:
    """The methods of a rank's `rpc` port. All ranks get each call; `rank` and `world` come from the cell."""

    def __init__(self, trainer: Trainer, reader: BatchReader) -> None:
        self._trainer = trainer
        self._reader = reader

    def methods(self) -> dict[str, Any]:
        """Name -> handler, for RpcThreadServer."""
        return {
            "init": self.init,
            "warm_start": self.warm_start,
            "train": self.train,
            "save": self.save,
            "export_weights": self.export_weights,
            "send_weights": self.send_weights,
        }

    def init(self, params: Any, frames: list[memoryview]) -> None:
        """Join the group, load the start model or a checkpoint, and take batches of this incarnation only."""
        resume = params["resume"]
        self._reader.incarnation = params["incarnation"]
        self._trainer.init(None if resume is None else msgspec.convert(resume, CheckpointRef))

    def warm_start(self, params: Any, frames: list[memoryview]) -> dict[str, float]:
        """Supervised steps; returns their metrics."""
        return self._trainer.warm_start()

    def train(self, params: Any, frames: list[memoryview]) -> dict[str, float]:
        """Pull this rank's shard of a rollout, learn from it, acknowledge it; returns metrics."""
        trainer, rollout_id = self._trainer, params["rollout_id"]
        started = time.monotonic()
        batch = self._reader.get(rollout_id, trainer.rank, trainer.world, BATCH_S)
        pulled = time.monotonic()
        metrics = trainer.train(batch)
        self._reader.ack(rollout_id, trainer.rank)
        return {**metrics, "seconds_pull": pulled - started, "seconds_learn": time.monotonic() - pulled}

    def save(self, params: Any, frames: list[memoryview]) -> list[dict[str, Any]]:
        """Write this rank's checkpoint files; returns its part of the manifest."""
        found: list[dict[str, Any]] = msgspec.to_builtins(self._trainer.save(Path(params["path"])))
        return found

    def export_weights(self, params: Any, frames: list[memoryview]) -> None:
        """Rank 0 writes an HF directory at `path`; the others take part where the weights are spread."""
        self._trainer.export_weights(Path(params["path"]))

    def send_weights(self, params: Any, frames: list[memoryview]) -> dict[str, Any] | None:
        """Rank 0 broadcasts its weights to `engines` as `version`; returns its UpdateResult, the others None."""
        from miles_hpc.inference.http_session import http_keys
        from miles_hpc.train.sender import send_weights

        trainer = self._trainer
        if trainer.rank:
            return None
        env = trainer.env
        result = send_weights(
            trainer.weights(),
            msgspec.convert(params["engines"], list[EngineInfo]),
            params["version"],
            pause_mode=trainer.config.inference.pause_mode,
            host=env.listen["rpc"].host,
            keys=http_keys(trainer.config, env.run_dir, env.attempt),
        )
        found: dict[str, Any] = msgspec.to_builtins(result)
        return found


def main() -> int:
    """Entry of the process: serve until the agent stops it."""
    setup_logging()
    env = WorkerEnv.from_environ()
    config = read_resolved(env.run_dir)
    with HubClient(env, timing=config.timing) as hub:
        trainer = make_trainer(config, env, env.worker_index, env.cell_size)
        service = RankService(trainer, BatchReader(hub))
        with RpcThreadServer(env.listen["rpc"], service.methods(), env.run_dir, env.attempt) as server:
            log.info("rank %d of %d serves at %s", env.worker_index, env.cell_size, server.address.netloc)
            server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
