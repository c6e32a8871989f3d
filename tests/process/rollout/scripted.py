"""A generate function whose tokens depend on the sample's seed alone, and which tells the test where it is.

Environment: SCRIPT_DIR (a directory), SCRIPT_DELAY_S. While a sample runs, `<SCRIPT_DIR>/running/<pid>.<group>.<index>`
exists; a file `<SCRIPT_DIR>/hold` keeps all samples from finishing.
"""

import asyncio
import os
import random
from pathlib import Path

from miles_hpc.rollout.generate import GenerateContext
from miles_hpc.rollout.sample import Sample


async def generate(sample: Sample, context: GenerateContext) -> None:
    place = Path(os.environ["SCRIPT_DIR"])
    mark = place / "running" / f"{os.getpid()}.{sample.group}.{sample.index}"
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    context.stage("scripted")
    try:
        await asyncio.sleep(float(os.environ.get("SCRIPT_DELAY_S", "0")))
        while (place / "hold").exists():  # noqa: ASYNC110 - the test is another process
            await asyncio.sleep(0.01)
    finally:
        mark.unlink()
    if sample.metadata.get("fails"):
        raise RuntimeError(f"prompt {sample.prompt_index} always fails")
    draw = random.Random(sample.seed)
    prompt = [1, 2, sample.prompt_index]
    answer = [draw.randrange(100) for _ in range(draw.randrange(1, 20))]
    sample.token_ids = prompt + answer
    sample.loss_mask = [0] * len(prompt) + [1] * len(answer)
    sample.logprobs = [0.0] * len(prompt) + [-draw.random() for _ in answer]
    sample.versions = [(sample.weight_version, len(prompt), len(prompt) + len(answer))]
    sample.response = str(sum(answer) % 2)
    sample.status = "completed"


def parity(sample: Sample) -> float:
    if sample.metadata.get("unscored"):
        raise ValueError(f"prompt {sample.prompt_index} cannot be scored")
    return float(sample.response)
