"""Functions of the user for `groups` and `generate`: an answer at once, a reward of it, and a stopwatch."""

import json
import os
import time
from pathlib import Path

from miles_hpc.rollout.generate import single_turn


async def generate(sample, context):
    sample.token_ids = [1, 2, 3, 4, sample.index]
    sample.loss_mask = [0, 0, 0, 1, 1]
    sample.logprobs = [0.0, 0.0, 0.0, -0.5, -0.25]
    sample.versions = [(1, 3, 5)]
    sample.response = "ok"
    sample.status = "completed"


async def long(sample, context):
    """As many tokens as the run's `max_response_tokens`."""
    count = context.config.rollout.max_response_tokens
    sample.token_ids = [7] * count
    sample.loss_mask = [1] * count
    sample.logprobs = [-0.5] * count
    sample.versions = [(1, 0, count)]
    sample.response = "x" * (4 * count)
    sample.status = "completed"


async def reward(sample):
    return float(sample.index % 2)


_times = []


async def timed(sample, context):
    """`single_turn`; the seconds of all so far lie in BENCH_TIMES after each thousandth."""
    begun = time.monotonic()
    await single_turn(sample, context)
    _times.append(time.monotonic() - begun)
    if len(_times) % 1000 == 0:
        Path(os.environ["BENCH_TIMES"]).write_text(json.dumps(_times[-1000:]))
