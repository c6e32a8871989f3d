"""Reward functions that the tests name by dotted path."""

import asyncio
import os
import signal
import time

from miles_hpc.rollout.sample import Sample


def length(sample: Sample) -> float:
    print("printing must not disturb the answers")
    return float(len(sample.response))


def lengths(samples: list[Sample]) -> list:
    found = {"": float("nan"), "x": "no number"}
    return [{"reward": found.get(one.response, len(one.response)), "category": f"of {len(samples)}"} for one in samples]


def hangs_on_h(sample: Sample) -> float:
    if sample.response == "h":
        time.sleep(60)
    return 1.0


def raises(sample: Sample) -> float:
    raise KeyError(f"no rule for {sample.response}")


def not_a_number(sample: Sample) -> float:
    return float("nan")


def dies(sample: Sample) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def uses_alarm(sample: Sample) -> float:
    signal.alarm(5)
    signal.alarm(0)
    return 2.0


async def slow_on_h(sample: Sample) -> float:
    await asyncio.sleep(60 if sample.response == "h" else 0)
    return 3.0


async def async_raises(sample: Sample) -> float:
    raise KeyError(f"no rule for {sample.response}")
