"""The data of the recipes. `python -m miles_hpc.train.make_data OUT_DIR`.

The recipes ship these files; this module says where they come from, and a test holds that they are equal.

- `quickstart.train.jsonl`, `quickstart.heldout.jsonl`: numbers to be written backwards, prompt and label.
- `quickstart.warm.jsonl`: prompt and answer for the supervised warm start. It teaches the form of an answer, a number
  of as many digits, and three ways to find it, of which the right one is the rarest: so the greedy answer of a
  warm-started policy is wrong nearly everywhere, while its samples are right often enough for a reward to act on.

- `smoke.train.jsonl`, `smoke.heldout.jsonl`: sums, which the scripted engine answers rightly in a part of all cases.

No number of the quickstart occurs in two of its files, and no sum in both of smoke's.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

TRAIN, HELDOUT, WARM = 1024, 256, 4096
# Fewer prompts than a run of smoke asks for, so that each goes through the end of a data epoch.
SMOKE_TRAIN, SMOKE_HELDOUT = 96, 32
SECOND_TURN = "Are you sure? Answer again."
"""As `rollout.second_turn` of the recipes has it, so that the warm start covers the second turn too."""

_SEED = 20240923
_DIGITS = 4
_FEWEST_DIFFERENT = 3
_SHARES = {"copied": 0.48, "rotated": 0.29, "reversed": 0.23}
_SECOND_TURN_EVERY = 4


def prompt_text(number: int) -> str:
    """The question."""
    return f"Write {number} backwards."


def ways(number: int) -> dict[str, str]:
    """The three answers that the warm start teaches; `reversed` is the right one."""
    text = str(number)
    return {"copied": text, "rotated": text[1:] + text[0], "reversed": text[::-1]}


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of each file, by file name; equal at each call."""
    rng = random.Random(_SEED)
    # Numbers with few different digits are left out: for those the three ways give equal answers.
    low, high = 10 ** (_DIGITS - 1), 10**_DIGITS
    numbers = [number for number in range(low, high) if len(set(str(number))) >= _FEWEST_DIFFERENT]
    rng.shuffle(numbers)
    train, heldout = numbers[:TRAIN], numbers[TRAIN : TRAIN + HELDOUT]
    warm = numbers[TRAIN + HELDOUT : TRAIN + HELDOUT + WARM]
    return {
        "quickstart.train.jsonl": [_question(number) for number in train],
        "quickstart.heldout.jsonl": [_question(number) for number in heldout],
        "quickstart.warm.jsonl": [_example(rng, index, number) for index, number in enumerate(warm)],
        **_smoke_rows(),
    }


def _smoke_rows() -> dict[str, list[dict[str, Any]]]:
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    chosen = random.Random(_SEED).sample(pairs, SMOKE_TRAIN + SMOKE_HELDOUT)
    rows = [{"prompt": f"What is {left} + {right}?", "label": str(left + right)} for left, right in chosen]
    return {"smoke.train.jsonl": rows[:SMOKE_TRAIN], "smoke.heldout.jsonl": rows[SMOKE_TRAIN:]}


def _question(number: int) -> dict[str, Any]:
    return {"prompt": prompt_text(number), "label": ways(number)["reversed"]}


def _example(rng: random.Random, index: int, number: int) -> dict[str, Any]:
    [way] = rng.choices(list(_SHARES), list(_SHARES.values()))
    answer = ways(number)[way]
    if index % _SECOND_TURN_EVERY:
        return {"prompt": prompt_text(number), "answer": answer}
    # In a second turn the policy stays with its first answer, so that what the second earns falls to the first as well.
    messages = [
        {"role": "user", "content": prompt_text(number)},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": SECOND_TURN},
    ]
    return {"prompt": messages, "answer": answer}


def file_text(rows: list[dict[str, Any]]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(arguments: list[str]) -> int:
    """Write the files into the directory that is named."""
    if len(arguments) != 1:
        print("usage: python -m miles_hpc.train.make_data OUT_DIR", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    for name, rows in make_rows().items():
        (out / name).write_text(file_text(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
