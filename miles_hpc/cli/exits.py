"""Exit codes of every verb, and how a refusal is printed."""

from __future__ import annotations

import sys

FINISHED = 0
FAILED = 1
BAD_INPUT = 2
DRAINED = 75
CANCELLED = 130

BY_OUTCOME = {"finished": FINISHED, "failed": FAILED, "drained": DRAINED, "cancelled": CANCELLED}


def refuse(text: str) -> int:
    """Print one line on stderr and return the exit code of bad input."""
    print(f"miles-hpc: {one_line(text)}", file=sys.stderr, flush=True)
    return BAD_INPUT


def one_line(text: object) -> str:
    """The text without line breaks, so that what comes from elsewhere cannot break a line of ours."""
    return " ".join(str(text).split())
