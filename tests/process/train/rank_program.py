"""One rank of a torch trainer without hub and driver: `rank_program.py RANK WORLD PORT MODEL RUN_DIR PLAN`.

PLAN: `train` trains twice on its shard of a fixed rollout and prints hash and metrics; `collective`
joins the group, says so, and waits in a collective for the others; `idle` joins and reads its input to the end.
"""

import hashlib
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from miles_hpc.config.schema import Config
from miles_hpc.rollout.convert import TrainBatch
from miles_hpc.train.torch_trainer import TorchTrainer
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.worker_env import WorkerEnv


def shard(rank, world, samples=8):
    """This rank's samples of a rollout that is the same for every rank and world."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 10, samples)
    ends = np.cumsum(lengths)
    tokens, mask = rng.integers(0, 300, ends[-1]), rng.random(ends[-1]) < 0.7
    advantages = rng.normal(size=samples)
    mine = np.arange(rank, samples, world)
    places = np.concatenate([np.arange(ends[row] - lengths[row], ends[row]) for row in mine])
    zeros = np.zeros(len(mine), np.int64)
    return TrainBatch(
        rollout_id=1,
        weight_version=1,
        dp_rank=rank,
        dp_size=world,
        total_samples=samples,
        total_response_tokens=int(mask.sum()),
        token_ids=tokens[places].astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths[mine])]).astype(np.int64),
        response_mask=mask[places].astype(np.uint8),
        logprobs=np.full(len(places), -5.8, np.float32),
        advantages=advantages[mine].astype(np.float32),
        rewards=zeros.astype(np.float32),
        group_index=zeros,
        sample_index=mine,
        prompt_index=zeros,
        status=zeros.astype(np.uint8),
        oldest_version=zeros + 1,
        micro_batches=np.array([0, len(mine)], np.int64),
    )


def main(rank, world, port, model, run_dir, plan):
    rank, world = int(rank), int(world)
    # Each rank has an address of its own, as on the nodes of a local cluster.
    env = WorkerEnv(
        run_dir=Path(run_dir),
        attempt=0,
        worker=f"trainer-00000-{rank:05d}",
        pool="trainer",
        cell_index=0,
        worker_index=rank,
        generation=Generation(1, 1),
        node=f"node-{rank:05d}",
        listen={"rpc": HostAndPort(f"127.0.0.{2 + rank}", 1)},
        master={"master": HostAndPort("127.0.0.2", int(port))},
        cell_size=world,
    )
    config = msgspec.convert({"model": {"path": model}, "train": {"learning_rate": 1e-3, "ranks": world}}, Config)
    trainer = TorchTrainer(config, env, rank, world)
    trainer.init(None)
    print("joined", flush=True)
    if plan == "idle":
        sys.stdin.read()
        return
    if plan == "collective":
        trainer._group.sum_(torch.ones(1))
        return
    for _ in range(2):
        metrics = trainer.train(shard(rank, world))
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    torch.save(weights, Path(run_dir) / f"weights-{rank}-of-{world}.pt")
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    print(digest, metrics["loss"], metrics["grad_norm"], metrics["logprob_gap"], flush=True)
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
