"""How the first node of a job tells the others that its attempt is ready to be joined, or that it never will be.

Preparing (files checked, model built, attempt claimed, secrets and resolved config written) happens once, on node 0.
The others wait for one file, named after the job, its restart count and the step, so that nothing which an earlier
start has left can be taken for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from miles_hpc.launch.allocation import JobKey
from miles_hpc.launch.attempts import attempts_dir
from miles_hpc.launch.first_node import FirstNode, Listening

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_PROGRESS_EVERY_S = 10.0
SHARED_WITHIN_S = 20.0
"""What a shared file system may take to show a new directory on another node."""
WORD_WITHIN_S = 75.0
"""What the last word of a first node that is gone may take to be seen: NFS keeps what it knows of a directory 60 s."""
FIRST_SIGN_S = 300.0
"""What the first node may take to begin, from when another one waits for it; unless a time limit is given."""
PREPARED_WITHIN_S = 1800.0
"""What it may take to prepare the run, likewise."""


class PreparationTimeout(Exception):
    """The first node has not said anything in time."""


class FirstNodeGone(Exception):
    """The first node has ended without a word: it was killed while it prepared the run, or lost."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What the first node says. `error` set: the run does not start, and `exit_code` is what the job ends with."""

    run_id: str = ""
    attempt: int = -1
    error: str = ""
    exit_code: int = 0


def prepared_path(run_dir: Path, job: JobKey, step: str) -> Path:
    """`<run_dir>/attempts/job-<job id>.<restart>.<step>.json`."""
    return attempts_dir(run_dir) / f"job-{job}.{step}.json"


def listening_path(run_dir: Path, job: JobKey, step: str) -> Path:
    """Where the first node says that it has begun to prepare; see `first_node`."""
    return attempts_dir(run_dir) / f"job-{job}.{step}.listening"


def say_prepared(run_dir: Path, job: JobKey, step: str, prepared: Prepared) -> None:
    """Publish, complete or not at all. Raises OSError when the run directory cannot be written."""
    target = prepared_path(run_dir, job, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(prepared) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)


def wait_shared(run_dir: Path, timeout_s: float = SHARED_WITHIN_S) -> None:
    """Wait until this node sees the run directory, which exists before the first task is started.

    Raises:
        PreparationTimeout: when it does not: it lies on a file system of another node alone.
    """
    deadline, never = time.monotonic() + timeout_s, threading.Event()
    while not run_dir.is_dir():
        if time.monotonic() >= deadline:
            raise PreparationTimeout(
                f"{run_dir} is not seen on {socket.gethostname()} after {timeout_s:g} s: choose a --run-dir on a file "
                "system that all nodes share"
            )
        never.wait(_LONGEST_PAUSE_S)


def wait_prepared(run_dir: Path, job: JobKey, step: str, timeout_s: float | None = None) -> Prepared:
    """Wait for the first node's word.

    Args:
        timeout_s: holds for its begin, too. None: `FIRST_SIGN_S` for its begin, `PREPARED_WITHIN_S` in all.

    Raises:
        PreparationTimeout: it has not begun, or not prepared the run, in time.
        FirstNodeGone: it ended without a word.
    """
    path, sign = prepared_path(run_dir, job, step), listening_path(run_dir, job, step)
    started = reported = time.monotonic()
    first: FirstNode | None = None
    gone_at: float | None = None
    pause, never = _FIRST_PAUSE_S, threading.Event()
    while True:
        looked = time.monotonic()
        try:
            # Listed, since NFS may remember for seconds that a name did not exist.
            names = os.listdir(path.parent)  # noqa: PTH208
            if path.name in names:
                return msgspec.json.decode(path.read_bytes(), type=Prepared)
            if first is None and sign.name in names:
                first = FirstNode(msgspec.json.decode(sign.read_bytes(), type=Listening))
        except OSError:
            pass  # not there yet, or a shared file system has lost hold of it for a moment (ESTALE)
        else:
            # Its last word may take a while to be seen here; only a look that has succeeded shows that there is none.
            if gone_at is not None and looked - gone_at >= WORD_WITHIN_S:
                raise FirstNodeGone(
                    f"the first node of job {job}{f' ({first.host})' if first else ''} has ended while it prepared the "
                    "run, and left no word: was it killed, for its memory maybe? look at its output"
                )
        now = time.monotonic()
        limit_s = timeout_s
        if limit_s is None:
            limit_s = PREPARED_WITHIN_S if first is not None else FIRST_SIGN_S
        if now - started >= limit_s:
            raise PreparationTimeout(
                f"the first node of job {job} has not {'prepared the run' if first else 'begun to prepare the run'} "
                f"within {limit_s:g} s: no {path}; look at its output, and whether the run directory lies on a file "
                "system that all nodes share; if it needs longer, give --prepare-timeout S"
            )
        if now - reported >= _PROGRESS_EVERY_S:
            reported = now
            log.info("waiting for the first node to prepare the run, %.0f s so far", now - started)
        # A shared file system has no notification that works across nodes, so it is looked at again.
        (first.gone if first is not None and gone_at is None else never).wait(min(pause, limit_s - (now - started)))
        if gone_at is None and first is not None and first.gone.is_set():
            gone_at = time.monotonic()
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
