"""Submitting a run through submitit."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import write_toml
from miles_hpc.config.schema import Config
from miles_hpc.launch import slurm_commands, slurm_options
from miles_hpc.launch.slurm_commands import SlurmError, scrubbed
from miles_hpc.launch.submitit_task import NodeTask

SUBMITTED = "submitted.toml"
"""The config as it was submitted: what the nodes read, however the user's files change while the job waits."""
_HOPELESS = (
    "AccountNotAllowed", "AssocMaxGRESPerJob", "AssocMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit",
    "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionTimeLimit", "QOSMaxGRESPerJob",
    "QOSMaxNodePerJobLimit", "QOSNotAllowed", "QOSMaxWallDurationPerJobLimit", "ReservationDeleted",
)  # fmt: skip
"""Reasons of a pending job that no waiting cures. Not among them: what other jobs of the account use up (AssocGrp…),
nodes that are down or reserved for now (ReqNodeNotAvail, and PartitionNodeLimit as well), and AccountingPolicy, which
stands for reasons without a name of their own."""
# Types of file systems that exist on one machine only, whatever is mounted where.
_PRIVATE_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "proc", "sysfs")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """`<run_dir>/slurm/job.json`."""

    job_id: str
    submitted: float
    """Seconds since 1970."""


def job_file(run_dir: Path) -> Path:
    """Where the newest submission of a run is noted."""
    return run_dir / "slurm" / "job.json"


def check_site(run_dir: Path) -> None:
    """Refuse what cannot work before anything is written.

    Raises:
        ConfigError: no Slurm here, or a run directory that the nodes will not see.
    """
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"submit: {program} was not found in PATH: this machine has no Slurm; "
                "`miles-hpc run` runs the same files on this machine alone"
            )
    start = f"--run-dir {str(run_dir)!r}"
    if re.search(r"[%\n\r\\]", str(run_dir)):
        raise ConfigError(f"{start}: Slurm cannot write its output there: use a path without %, \\ and line breaks")
    kind = file_system_of(run_dir)
    if kind in _PRIVATE_FILE_SYSTEMS:
        raise ConfigError(
            f"{start}: lies on {kind}, which other nodes do not see: choose a directory on a shared file system"
        )


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that a path lies on, or will; empty when the kernel does not say."""
    best, kind = -1, ""
    wanted = path.resolve()
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        place = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        # Of two mounts on one place the later one is seen.
        if wanted.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), fields[2]
    return kind


def minutes(text: str) -> int | None:
    """Whole minutes of a time limit in Slurm's forms, rounded up; None: not set. 0 is Slurm's word for no limit.

    Raises:
        ConfigError: when it is none of these forms.
    """
    if not text:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f'slurm.time = "{text}": expected minutes, minutes:seconds, hours:minutes:seconds or days-…')
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        seconds = int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    elif match["third"] is not None:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return math.ceil(seconds / 60)


def node_command(config: Config, run_dir: Path, resume: bool) -> list[str]:
    """What every node of the job becomes."""
    slurm = config.slurm
    python = slurm_options.python_in(slurm.container, sys.executable)
    container = slurm_options.apptainer_command(slurm.container, run_dir, slurm.gpus_per_node > 0)
    again = ["--resume"] if resume else []
    return [*container, python, "-m", "miles_hpc.cli", "agent", str(run_dir / SUBMITTED), "--run-dir", str(run_dir),
            *again]  # fmt: skip


class _Executor:
    """submitit's executor with the parameters of a run."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        from submitit.slurm.slurm import SlurmExecutor

        slurm = config.slurm
        container = slurm.container
        python = container.python if container is not None and container.kind == "pyxis" else None
        self.executor = SlurmExecutor(folder=run_dir / "slurm", python=python)
        options = slurm_options.sbatch_options(slurm, config.name)
        for decided in ("nodes", "ntasks-per-node", "job-name", "signal", "time", "open-mode"):
            options.pop(decided, None)
        self.executor.update_parameters(
            job_name=config.name,
            nodes=slurm.nodes,
            ntasks_per_node=1,
            time=minutes(slurm.time),
            signal_delay_s=slurm.signal_s,
            wckey=None,
            stderr_to_stdout=True,
            setup=slurm_options.setup_lines(slurm.setup),
            teardown=slurm_options.ending(run_dir),
            srun_args=slurm_options.srun_options(slurm, run_dir),
            additional_parameters=options,
        )

    def text(self) -> str:
        """The batch script."""
        return self.executor._make_submission_file_text(self.executor._submitit_command_str, "")


def script(config: Config, run_dir: Path) -> str:
    """The batch script that `submit_run` would give to sbatch."""
    return _Executor(config, run_dir).text()


def submit_run(config: Config, run_dir: Path, *, resume: bool = False) -> str:
    """Write what the nodes read, and submit. Returns the job id.

    Raises:
        ConfigError: when Slurm does not take the job, in one line; nothing is left in the queue.
        OSError: when the run directory cannot be written.
    """
    (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    write_toml(config, run_dir / SUBMITTED)
    with scrubbed_environ():
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = _Executor(config, run_dir).executor
        try:
            # submitit prints what sbatch says, too; here it becomes one line of the error.
            with contextlib.redirect_stderr(io.StringIO()):
                job_id = executor.submit(NodeTask(node_command(config, run_dir, resume))).job_id
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(f"Slurm refused the job: {_said(str(error))}") from error
    _refuse_hopeless(job_id)
    note = run_dir / "slurm" / f".job.{os.getpid()}"
    note.write_bytes(msgspec.json.encode(Submitted(job_id=job_id, submitted=time.time())) + b"\n")
    note.replace(job_file(run_dir))
    return job_id


def _said(text: str) -> str:
    """What sbatch itself said, in one line."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return "; ".join(dict.fromkeys(errors)) or " ".join(text.split())[-300:]


def _refuse_hopeless(job_id: str) -> None:
    """Some clusters queue what can never start: take it back, and say why."""
    try:
        row = slurm_commands.squeue([job_id]).get(job_id)
        if row is not None and row.state.name == "PENDING" and row.reason in _HOPELESS:
            slurm_commands.call(["scancel", job_id])
            raise ConfigError(f"Slurm would never start the job ({row.reason}): check [slurm] against `sinfo`")
    except SlurmError:
        return  # it is in the queue; what becomes of it is seen later


@contextlib.contextmanager
def scrubbed_environ() -> Iterator[None]:
    """This process's environment without anything of a job around it, or of a run that it belongs to."""
    before: Mapping[str, str] = dict(os.environ)
    kept: dict[str, Any] = {
        name: value for name, value in scrubbed(before).items() if not name.startswith(("MILES_HPC_", "SUBMITIT_"))
    }
    try:
        for name in before.keys() - kept.keys():
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)
