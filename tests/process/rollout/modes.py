"""Functions that the tests of rollout modes name by dotted path. SCRIPT_DIR/slow holds how long a sample takes."""

import asyncio
import os
from pathlib import Path

from miles_hpc.rollout.sample import Sample

PROMPT = [1, 2]


def fill(sample, answer, version=None):
    sample.token_ids = PROMPT + answer
    sample.loss_mask = [0, 0] + [1] * len(answer)
    sample.logprobs = [0.0, 0.0] + [-0.5] * len(answer)
    version = sample.weight_version if version is None else version
    sample.versions = [(version, 2, 2 + len(answer))]
    sample.response = str(answer)
    sample.status = "completed"


async def uneven(sample, context):
    """Late prompts are slow, so that an over-sampled step leaves them over; interrupted, they keep what they have."""
    steps = 400 if sample.prompt_index % 6 >= 4 else 1
    answer = list(sample.token_ids[2:])
    for number in range(len(answer), steps):
        if context.interrupted:
            fill(sample, answer)
            sample.status = "aborted"
            return
        answer.append(number)
        await asyncio.sleep(0.01 if steps > 1 else 0)
        if not context.config.rollout.partial and steps > 1 and number > 20:
            break
        if sample.token_ids:
            break  # it had been interrupted: now it is soon done
    fill(sample, answer)


async def parts(sample, context):
    """One generation that becomes two samples."""
    second = Sample(**{name: getattr(sample, name) for name in sample.__struct_fields__})
    fill(sample, [sample.index])
    fill(second, [sample.index, 9, 9])
    sample.reward = second.reward = float(sample.index)
    return [sample, second]


async def of_version(sample, context):
    """Tokens of the version that the file says, so that groups can be too old."""
    said = Path(os.environ["SCRIPT_DIR"]) / "version"
    fill(sample, [sample.index], int(said.read_text()) if said.exists() else None)


async def fails_once(sample, context):
    mark = Path(os.environ["SCRIPT_DIR"]) / f"failed.{sample.group}.{sample.index}"
    if sample.index == 1 and not mark.exists():
        mark.touch()
        raise RuntimeError("the first try fails")
    fill(sample, [sample.seed % 100])


def by_index(sample):
    return float(sample.index % 2)


def by_prompt(sample):
    """Equal rewards for odd prompts."""
    return float(sample.index % 2 if sample.prompt_index % 2 == 0 else 1)


def always_one(sample):
    return 1.0


async def ranks(samples):
    """A group reward."""
    return [float(place) for place, _ in enumerate(samples)]


def rows():
    return [{"prompt": f"own {number}", "label": "", "image": f"pixels {number}"} for number in range(6)]


def only_even(samples):
    return samples[0].prompt_index % 2 == 0, "odd prompt!"


async def counted(sample, context):
    """Leaves a line for each time that it begins; waits while SCRIPT_DIR/hold is there."""
    place = Path(os.environ["SCRIPT_DIR"])
    with (place / "begun").open("a") as file:
        file.write(f"{sample.group}.{sample.index}\n")
    while (place / "hold").exists():  # noqa: ASYNC110 - the test is another process
        await asyncio.sleep(0.01)
    fill(sample, [sample.seed % 1000, sample.index])


async def stepped(sample, context):
    """The last sample of a group takes long, the others are done at once; leaves what runs at once."""
    place = Path(os.environ["SCRIPT_DIR"])
    mark = place / f"in.{os.getpid()}.{sample.group}.{sample.index}"
    mark.touch()
    with (place / "crowd").open("a") as file:
        file.write(f"{len(list(place.glob('in.*')))} {len({path.name.split('.')[2] for path in place.glob('in.*')})}\n")
    await asyncio.sleep(0.3 if sample.index == 3 else 0.02)
    mark.unlink()
    fill(sample, [sample.index])
