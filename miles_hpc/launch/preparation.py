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

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_PROGRESS_EVERY_S = 10.0
SHARED_WITHIN_S = 20.0
"""What a shared file system may take to show a new directory on another node."""


class PreparationTimeout(Exception):
    """The first node has not said anything in time."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What the first node says. `error` set: the run does not start, and `exit_code` is what the job ends with."""

    run_id: str = ""
    attempt: int = -1
    error: str = ""
    exit_code: int = 0


def prepared_path(run_dir: Path, job: JobKey, step: str) -> Path:
    """`<run_dir>/attempts/job-<job id>.<restart>.<step>.json`."""
    return attempts_dir(run_dir) / f"job-{job}.{step}.json"


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


def wait_prepared(run_dir: Path, job: JobKey, step: str, timeout_s: float) -> Prepared:
    """Wait for the first node's word.

    Raises:
        PreparationTimeout: after `timeout_s`.
    """
    path = prepared_path(run_dir, job, step)
    started = reported = time.monotonic()
    pause, never = _FIRST_PAUSE_S, threading.Event()
    while True:
        try:
            # Listed, since NFS may remember for seconds that a name did not exist.
            if path.name in os.listdir(path.parent):  # noqa: PTH208
                return msgspec.json.decode(path.read_bytes(), type=Prepared)
        except OSError:
            pass  # not there yet, or a shared file system has lost hold of it for a moment (ESTALE)
        now = time.monotonic()
        if now - started >= timeout_s:
            raise PreparationTimeout(
                f"the first node of job {job} has not prepared the run within {timeout_s:g} s: no {path}; look at its "
                "output, and whether the run directory lies on a file system that all nodes share"
            )
        if now - reported >= _PROGRESS_EVERY_S:
            reported = now
            log.info("waiting for the first node to prepare the run, %.0f s so far", now - started)
        # A shared file system has no notification that works across nodes, so it is looked at again.
        never.wait(min(pause, timeout_s - (now - started)))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
