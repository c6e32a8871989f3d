"""The same finished samples for every carrier: int32 tokens, float32 log-probs, uint8 mask, 4 bytes of text a token."""

import ctypes
import gc
from pathlib import Path

import numpy as np

PROMPT_BYTES = 2048


def arrays(samples, tokens):
    rng = np.random.default_rng(0)
    text = "".join(map(chr, rng.integers(97, 123, 4 * tokens)))
    return [
        {
            "tokens": rng.integers(0, 152_000, tokens, dtype=np.int32),
            "logprobs": -rng.random(tokens, dtype=np.float32),
            "mask": (rng.random(tokens, dtype=np.float32) > 0.1).view(np.uint8),
            "prompt": "p" * PROMPT_BYTES,
            "response": text,
            "reward": float(index),
        }
        for index in range(samples)
    ]


def lists(made):
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in one.items()} for one in made]


def payload_bytes(samples, tokens):
    """What is counted as moved: all columns, without headers."""
    return samples * (13 * tokens + PROMPT_BYTES)


def status_mb(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def reset_peak():
    """Forget the peak of memory so far; returns what is in use now, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_mb("VmRSS")


def tensors(columns):
    """Token ids, log-probs and masks as torch tensors of their own types, one of each for a sample."""
    import torch

    return [tuple(map(torch.from_numpy, one)) for one in columns]


def check(found):
    """Reads every element once, so that lazily mapped memory is paid for; the same number for every carrier."""
    return sum(int(t.sum()) + int(m.sum()) for t, _, m in found) + round(sum(float(p.sum()) for _, p, _ in found))
