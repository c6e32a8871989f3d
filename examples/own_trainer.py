"""Your own trainer in plain torch on a run of mode "external": `python own_trainer.py [RUN_DIR]`, or torchrun."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import miles_hpc

run_dir = Path(sys.argv[1] if sys.argv[1:] else os.environ["RUN_DIR"])
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")

with miles_hpc.connect(run_dir) as client:
    start = client.checkpoint or next(run_dir.glob("weights/0*/config.json")).parent
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in client.batches(dp_rank=rank, dp_size=world):
        optimizer.zero_grad()
        total = 0.0
        for row in range(len(batch)):
            span = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
            ids = torch.tensor(batch.token_ids[span]).long()[None]
            mask = torch.tensor(batch.response_mask[span])[1:].bool()
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            loss = -(float(batch.advantages[row]) * logprobs[mask]).sum() / max(1, batch.total_response_tokens)
            loss.backward()
            total += loss.item()
        for parameter in model.parameters() if world > 1 else ():
            dist.all_reduce(parameter.grad)  # the loss is a share of the whole batch's, so gradients add up
        optimizer.step()
        if rank == 0:
            model.save_pretrained(run_dir / "own-trainer")
            version = client.publish_weights(run_dir / "own-trainer")
            print(f"step {batch.rollout_id}: loss {total:.4f}, weights {version}", flush=True)
        client.commit(checkpoint=str(run_dir / "own-trainer"), metrics={"loss": total})
