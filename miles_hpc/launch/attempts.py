"""Attempts of a run, each claimed once by link(2), and the registry of this user's runs."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from miles_hpc.agent.procfs import boot_id, marked, pid_namespace, snapshot, start_time

_NAME = re.compile(r"(\d+)\.json")
_HUB_PATIENCE_S = 3.0


class AttemptError(Exception):
    """The run directory cannot be used for a new attempt; the text says why and what to do."""


class RunIsLive(AttemptError):
    """Another attempt of this run is going on; the text names its host and pid."""


class RunExists(AttemptError):
    """The directory holds a run, and the caller did not ask to resume it."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run. `pid` counts in the namespace `pid_ns`; `pid_start` is in clock ticks since boot `boot`."""

    number: int
    run_id: str
    job_id: str = ""
    restart: int = 0
    nodes: int = 0
    """Nodes of the allocation; 0: a run on one machine."""
    host: str
    pid: int
    pid_start: int
    boot: str = ""
    started: float
    """Wall clock, seconds since 1970."""
    pid_ns: str = ""
    """"": not known."""


def attempts_dir(run_dir: Path) -> Path:
    """`<run_dir>/attempts`."""
    return run_dir / "attempts"


def read_attempts(run_dir: Path) -> list[Attempt]:
    """All claimed attempts, in order.

    Raises:
        AttemptError: when a claim file does not parse.
    """
    directory = attempts_dir(run_dir)
    if not directory.is_dir():
        return []
    found = []
    claims = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(claims, key=lambda path: int(path.stem)):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Attempt))
        except msgspec.MsgspecError as error:
            raise AttemptError(
                f"{path} is no claim of an attempt: {error}: move it away to use this directory"
            ) from error
    return found


def holds_run(run_dir: Path) -> bool:
    """Whether an attempt was ever claimed there, as far as this user may see; a refused start of a job claims none."""
    try:
        return any(_NAME.fullmatch(path.name) for path in attempts_dir(run_dir).iterdir())
    except OSError:
        return False


def is_on_this_machine(attempt: Attempt) -> bool:
    """Whether an attempt was claimed on this machine, since it was started; in a container of it, perhaps."""
    return attempt.host == socket.gethostname() and attempt.boot in ("", boot_id())


def is_here(attempt: Attempt) -> bool:
    """Whether its pid means the same process here: on this machine, and in the same container or in none."""
    return is_on_this_machine(attempt) and attempt.pid_ns in ("", pid_namespace())


def is_live(attempt: Attempt) -> bool:
    """Whether the process that claimed an attempt still runs. Only where `is_here` is true can it be told; else: no."""
    return is_here(attempt) and start_time(attempt.pid) == attempt.pid_start


def gone_from_here(run_dir: Path, claim: Attempt) -> str:
    """Why a run of this machine cannot live any more; "" where that is not known. Jobs outlive who claimed them."""
    if claim.job_id or not is_here(claim) or is_live(claim):
        return ""
    # Without its command a run ends within seconds, and its hub may still write a verdict.
    prefix = f"{claim.run_id}/{claim.number}/"
    if marked(snapshot(), prefix, str(run_dir.resolve()), skip=[os.getpid()]):
        return ""
    return f"the command that started it (pid {claim.pid}) and all its processes are gone"


def who_runs(run_dir: Path, attempt: Attempt, environ: Mapping[str, str] = os.environ) -> str:
    """Why an attempt counts as going on, for people; "" when nothing speaks for it.

    The process that claimed it is asked for on its own host. Without a verdict, an attempt of a Slurm job is asked for
    at its hub, wherever that is, and at Slurm; one of another container of this machine at its hub.
    """
    if is_live(attempt):
        job = f"as job {attempt.job_id} " if attempt.job_id else ""
        return f"attempt {attempt.number} runs {job}on host {attempt.host} with pid {attempt.pid}"
    if (run_dir / "verdicts" / f"attempt-{attempt.number}.json").exists():
        return ""
    if not attempt.job_id:
        hub = "" if is_here(attempt) or not is_on_this_machine(attempt) else _answering_hub(run_dir, attempt.number)
        where = f"attempt {attempt.number} runs in another container of host {attempt.host}"
        return f"{where} (its hub answers: {hub})" if hub else ""
    if attempt.job_id == environ.get("SLURM_JOB_ID") and attempt.restart != int(
        environ.get("SLURM_RESTART_COUNT") or 0
    ):
        return ""  # Slurm itself has ended it: this is the requeued job
    where = f"attempt {attempt.number} runs as job {attempt.job_id} on host {attempt.host}"
    if hub := _answering_hub(run_dir, attempt.number):
        return f"{where} (its hub answers: {hub})"
    if attempt.job_id != environ.get("SLURM_JOB_ID") and (state := _slurm_state(attempt)):
        return f"{where} (Slurm: {state})"
    return ""


def _answering_hub(run_dir: Path, attempt: int) -> str:
    from miles_hpc.wire.operator import OperatorClient
    from miles_hpc.wire.sockets import HubError

    try:
        with OperatorClient(run_dir, attempt, timeout_s=_HUB_PATIENCE_S) as hub:
            return hub.status().hub
    except HubError:
        return ""


def _slurm_state(attempt: Attempt) -> str:
    """What Slurm calls a job that may still run; "" when it has ended, is not known, or Slurm does not answer."""
    from miles_hpc.launch.slurm_commands import SlurmError, squeue

    try:
        row = squeue([attempt.job_id]).get(attempt.job_id)
    except SlurmError:
        return ""
    return row.state.name if row is not None and row.state.alive and row.restarts == attempt.restart else ""


def claim_attempt(
    run_dir: Path,
    *,
    resume: bool = False,
    run_id: str = "",
    nodes: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> Attempt:
    """Claim the next attempt of a run for this process.

    Args:
        resume: allow a directory that holds a run already.
        run_id: of a new run; default: the directory's name. A resumed run keeps the one it has.
        nodes: of the allocation, under Slurm.

    Raises:
        RunExists: when it holds a run and `resume` is off.
        RunIsLive: when another attempt is going on here.
        AttemptError: when a claim file is broken.
        OSError: when the directory cannot be written.
    """
    directory = attempts_dir(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        earlier = read_attempts(run_dir)
        for other in earlier:
            # Only the newest can have a hub: each attempt saw the earlier ones end.
            ask = other is earlier[-1] or (not other.job_id and is_live(other))
            reason = who_runs(run_dir, other, environ) if ask else ""
            if reason:
                raise RunIsLive(f"{run_dir} is in use: {reason}; wait for it, or stop it first")
        if earlier and not resume:
            raise RunExists(
                f"{run_dir} holds run {earlier[-1].run_id!r} with {len(earlier)} attempts: "
                "continue it with --resume, or choose another --run-dir"
            )
        attempt = Attempt(
            number=earlier[-1].number + 1 if earlier else 0,
            run_id=earlier[-1].run_id if earlier else run_id or run_dir.absolute().name,
            job_id=environ.get("SLURM_JOB_ID", ""),
            restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
            nodes=nodes,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_start=start_time(os.getpid()) or 0,
            boot=boot_id(),
            started=time.time(),
            pid_ns=pid_namespace(),
        )
        if _link(directory / f"{attempt.number}.json", attempt):
            point_latest(run_dir, attempt.number)
            return attempt


def _link(target: Path, attempt: Attempt) -> bool:
    """Publish a claim, complete or not at all. False: somebody else was faster."""
    draft = target.with_name(f".draft-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with draft.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(attempt), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, target)
        except FileExistsError:
            # Over NFS a link(2) whose answer was lost is sent again and then finds its own file.
            return draft.stat().st_nlink == 2
    finally:
        draft.unlink(missing_ok=True)
    return True


def point_latest(run_dir: Path, attempt: int) -> None:
    """`logs/latest` -> `attempt-<n>`, replaced in one step."""
    logs = run_dir / "logs"
    (logs / f"attempt-{attempt}").mkdir(parents=True, exist_ok=True)
    draft = logs / f".latest-{os.getpid()}-{os.urandom(4).hex()}"
    draft.symlink_to(f"attempt-{attempt}")
    draft.replace(logs / "latest")


# ---------------------------------------------------------------------------------------------- registry
class RegisteredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run of this user is."""

    run_id: str
    run_dir: str
    attempt: int
    host: str
    pid: int
    started: float


def registry_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/miles-hpc/runs`."""
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "miles-hpc" / "runs"


def register(run_dir: Path, attempt: Attempt, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Note a run in the registry, so that other commands find it by its id.

    None: there is no place to write to, which harms no run. Two run directories of one name share an entry: the newest
    start has it.
    """
    directory = registry_dir(environ)
    entry = RegisteredRun(
        run_id=attempt.run_id,
        run_dir=str(run_dir.absolute()),
        attempt=attempt.number,
        host=attempt.host,
        pid=attempt.pid,
        started=attempt.started,
    )
    target = directory / f"{attempt.run_id}.json"
    draft = directory / f".{attempt.run_id}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(entry) + b"\n")
        draft.replace(target)
    except OSError:
        return None
    return target


def registered_runs(environ: Mapping[str, str] = os.environ) -> list[RegisteredRun]:
    """All runs that are known and whose directory still exists, newest first."""
    found = []
    for path in registry_dir(environ).glob("*.json"):
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=RegisteredRun)
        except (OSError, msgspec.MsgspecError):
            continue  # half-written by a version that knew less, or gone meanwhile
        if Path(entry.run_dir).is_dir():
            found.append(entry)
    return sorted(found, key=lambda entry: entry.started, reverse=True)
