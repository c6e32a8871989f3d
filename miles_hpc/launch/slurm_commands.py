"""Slurm's own commands, called with a deadline, their answers as values. One call asks for any number of jobs."""

from __future__ import annotations

import datetime
import logging
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_hpc.launch.job_states import JobState, job_state

PATIENCE_S = 20.0
"""A slurmctld that is being restarted lets its clients wait."""
_FIELDS = ("JobID", "State", "RestartCnt", "EndTime", "BatchHost", "Reason")
_SCRUBBED = ("SLURM_", "SBATCH_", "PMI_", "PMIX_", "PMI2_")
_KEPT = ("SLURM_CONF",)
# A user's own defaults for these commands: filters that would hide a job, formats, a question before a cancel.
_DEFAULTS = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
# What sinfo calls nodes that are not down, whatever flags follow: `*` not responding, `~#!%` power, `$@^-+` plans.
_UP = ("alloc", "comp", "idle", "mix", "plan", "resv", "reserved")
# `State=DOWN+DRAIN+NOT_RESPONDING`, in older versions `State=DOWN*+DRAIN`.
_DOWN = re.compile(r"NodeName=(\S+) (?:.* )?State=DOWN\b")

log = logging.getLogger(__name__)


class SlurmError(Exception):
    """A command of Slurm is missing, failed or did not answer; the text holds what it said, in one line."""


class SlurmMissing(SlurmError):
    """There is no such command on this machine."""


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job, as squeue or sacct sees it. `end` is seconds since 1970, None: not said."""

    job_id: str
    state: JobState
    restarts: int = 0
    end: float | None = None
    batch_host: str = ""
    reason: str = ""
    exit_code: int | None = None


def scrubbed(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which nothing of a surrounding job can leak into a new one."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name.startswith(_SCRUBBED) or name in ("SLURMD_NODENAME", "PMI"))
    }


def plain(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which Slurm's commands do what their options say, and print times as `moment` reads them."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_DEFAULTS)}
    return {**kept, "SLURM_TIME_FORMAT": "standard"}


def call(argv: Sequence[str], *, timeout_s: float = PATIENCE_S) -> str:
    """Run one command, without the user's own defaults for it, and return its output.

    Raises:
        SlurmMissing: when it is not installed.
        SlurmError: when it fails, or takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=plain(),
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmMissing(f"{argv[0]} was not found in PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{argv[0]} did not answer within {timeout_s:g} s") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{argv[0]} ended with {done.returncode}: {said[-500:]}")
    return done.stdout


def squeue(job_ids: Sequence[str], *, timeout_s: float = PATIENCE_S) -> dict[str, JobRow]:
    """The jobs that slurmctld knows among these; those that it has forgotten are left out. Raises SlurmError."""
    layout = ",".join(f"{field}:|" for field in _FIELDS)
    try:
        text = call(
            ["squeue", "--noheader", "--states=all", "--jobs", ",".join(job_ids), "-O", layout], timeout_s=timeout_s
        )
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    found = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) < len(_FIELDS):
            continue
        job_id, state, restarts, end, host, reason = parts[: len(_FIELDS)]
        found[job_id] = JobRow(
            job_id=job_id,
            state=job_state(state),
            restarts=int(restarts) if restarts.isdigit() else 0,
            end=moment(end),
            batch_host="" if host in ("n/a", "(null)") else host,
            reason=reason,
        )
    return found


def sacct(job_ids: Sequence[str], *, timeout_s: float = PATIENCE_S) -> dict[str, JobRow]:
    """The newest record of each of these jobs in the accounting. Raises SlurmError, also where there is none."""
    text = call(
        ["sacct", "--noheader", "--allocations", "--parsable2", "--jobs", ",".join(job_ids),
         "--format", "JobIDRaw,State,ExitCode,End"],
        timeout_s=timeout_s,
    )  # fmt: skip
    found = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 4:
            code = parts[2].partition(":")[0]
            found[parts[0]] = JobRow(
                job_id=parts[0],
                state=job_state(parts[1]),
                end=moment(parts[3]),
                exit_code=int(code) if code.isdigit() else None,
            )
    return found


def down_nodes(hosts: Sequence[str], *, timeout_s: float = PATIENCE_S) -> set[str]:
    """Those of these nodes that Slurm calls down. Raises SlurmError."""
    if not hosts:
        return set()
    text = call(["sinfo", "--noheader", "--all", "-N", "--nodes", ",".join(hosts), "-o", "%N|%T"], timeout_s=timeout_s)
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    # `down*` too: not responding *and* given up. A mere `*` (idle*, mixed*) is not.
    states = {name.strip(): state.strip().lower() for name, state in rows}
    down = {name for name, state in states.items() if state.startswith("down")}
    # What else was decided about a node hides whether it is down: drained*, fail*, reboot^, maint …
    unclear = sorted(name for name, state in states.items() if not state.startswith(("down", *_UP)))
    if unclear:
        try:
            text = call(["scontrol", "--oneliner", "show", "node", ",".join(unclear)], timeout_s=timeout_s)
        except SlurmError as error:
            log.warning("whether %s are down is not known: %s", ", ".join(unclear), error)
        else:
            down |= {found[1] for found in map(_DOWN.match, text.splitlines()) if found}
    return down


def config_value(name: str, *, timeout_s: float = PATIENCE_S) -> str:
    """A setting of slurm.conf as slurmctld has it, such as KillWait; "" when it has none. Raises SlurmError."""
    for line in call(["scontrol", "show", "config"], timeout_s=timeout_s).splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip().lower() == name.lower():
            return value.strip()
    return ""


def seconds_of(text: str, default: float) -> float:
    """The number in a setting such as `30 sec`."""
    match = re.match(r"\s*(\d+)", text)
    return float(match[1]) if match else default


def moment(text: str) -> float | None:
    """Seconds since 1970 of a time as Slurm prints it, in this machine's time zone; None for `N/A` and `Unknown`."""
    try:
        return time.mktime(datetime.datetime.fromisoformat(text.strip()).timetuple())
    except ValueError:
        return None
