"""The child of a Scorer: reads samples from standard input, writes (error text, reward) to standard output."""

from __future__ import annotations

import os
import struct
import sys
import traceback
from typing import Any

import msgspec

from miles_hpc.rollout.rewards import pack_message, plain, reward_function
from miles_hpc.rollout.sample import Sample


def main(argv: list[str]) -> int:
    """Serve until standard input ends, which it does when the parent is gone."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the function prints belongs in the log, not between the answers
    questions = sys.stdin.buffer
    try:
        function: Any = reward_function(argv[0])
    except Exception:
        answers.write(pack_message((traceback.format_exc(), None)))
        return 1
    answers.write(pack_message(("", None)))
    decoder = msgspec.msgpack.Decoder(Sample | list[Sample])
    while len(head := questions.read(4)) == 4:
        sample = decoder.decode(questions.read(struct.unpack("<I", head)[0]))
        try:
            answer: tuple[str, Any] = ("", plain(function(sample)))
        except Exception:
            answer = (traceback.format_exc(), None)
        answers.write(pack_message(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
