"""What submitit starts on every node: it becomes the node's agent at once."""

from __future__ import annotations

import os
from typing import NoReturn


class NodeTask:
    """A callable for submitit, pickled at submission.

    Its first act is execve: submitit's signal handlers would requeue the job by themselves, and its result file says
    nothing that the run directory does not say better.
    """

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv

    def __call__(self) -> NoReturn:
        os.execvp(self.argv[0], self.argv)
