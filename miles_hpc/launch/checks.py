"""What can be wrong with a node or a site, each as one finding: what was seen, why it matters, what to do."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from miles_hpc.agent import gpus, inventory, procfs
from miles_hpc.config.timing import Timing
from miles_hpc.launch import slurm_commands
from miles_hpc.launch.allocation import NotInAllocation, Task
from miles_hpc.launch.node_address import addresses
from miles_hpc.launch.slurm_commands import SlurmError

FILES_NEEDED = 4096
SCRATCH_NEEDED = 1 << 30
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 30.0
_PROGRAMS = {
    "sbatch": "fail", "srun": "fail", "squeue": "fail", "scontrol": "fail", "scancel": "fail", "sinfo": "warn",
    "sacct": "warn",
}  # fmt: skip
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOCAL = ("127.", "::1", "fe80")
_DRIVER = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")
_MODEL_HUB = ("huggingface.co", 443)

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the doctor's. `remedy` is empty when all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""
    node: str = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of itself, and how it saw the others."""

    host: str
    index: int
    findings: list[Finding]
    addresses: list[str] = []
    port: int = 0
    wall_s: float = 0.0
    gpus: list[str] = []
    driver: str = ""


def _ok(check: str, text: str) -> Finding:
    return Finding(check=check, level="ok", text=text)


# ---------------------------------------------------------------------------------------------- the site
def site_checks(timing: Timing) -> Iterator[Finding]:
    """Slurm as a login node sees it."""
    for name, level in _PROGRAMS.items():
        if shutil.which(name) is None:
            yield Finding(
                check="programs", level="fail" if level == "fail" else "warn", text=f"{name} is not in PATH",
                remedy="load Slurm's module, or ask the site" if level == "fail" else
                "runs work without it; how lost jobs ended is then not known",
            )  # fmt: skip
    try:
        version = slurm_commands.call(["scontrol", "--version"]).strip()
        track = slurm_commands.config_value("ProctrackType")
        kill_wait = slurm_commands.seconds_of(slurm_commands.config_value("KillWait"), 30.0)
    except SlurmError as error:
        yield Finding(check="slurm", level="fail", text=str(error), remedy="is slurmctld up? try `scontrol ping`")
        return
    yield _ok("slurm", f"{version}, {track}")
    if "cgroup" not in track:
        yield Finding(
            check="proctrack", level="warn", text=f"{track} does not find processes that leave their parent",
            remedy="nothing to do: agents kill what their workers start; a killed agent and warden may leave processes",
        )  # fmt: skip
    needed = timing.stop_grace + 5.0
    if kill_wait < needed:
        yield Finding(
            check="killwait", level="warn", text=f"KillWait is {kill_wait:g} s, an orderly stop needs {needed:g} s",
            remedy="set slurm.drain_margin_s so that runs drain before the time limit; after scancel some are killed",
        )  # fmt: skip
    else:
        yield _ok("killwait", f"KillWait {kill_wait:g} s")


def accounting_check() -> Finding:
    """Whether sacct answers."""
    try:
        slurm_commands.call(["sacct", "--noheader", "-X", "--format=JobID", "--starttime=now"])
    except SlurmError as error:
        return Finding(
            check="accounting", level="warn", text=str(error),
            remedy="nothing to do: verdicts in the run directory say how runs ended",
        )  # fmt: skip
    return _ok("accounting", "sacct answers")


# ----------------------------------------------------------------------------------------------- a node
def node_checks(directory: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What a node can say of itself alone. `directory` is where run directories will be."""
    yield cpu_check(environ)
    yield from limit_checks()
    yield scratch_check([environ.get("SLURM_TMPDIR", ""), environ.get("TMPDIR", ""), "/tmp"])
    yield link_check(directory)
    yield lock_check(directory)
    yield interface_check()
    yield proxy_check(environ)
    yield route_check()
    yield leftovers_check()


def cpu_check(environ: Mapping[str, str]) -> Finding:
    """CPU binding against the grant."""
    usable = inventory.usable_cpus()
    try:
        granted = Task.from_environ(environ).cpus
    except NotInAllocation:
        granted = 0
    there = os.cpu_count() or 1
    wanted = min(granted, there) if granted else 0
    if wanted and usable < wanted:
        return Finding(
            check="cpus", level="fail", text=f"{usable} of {wanted} granted CPUs may be used",
            remedy="pass --cpus-per-task to srun as well, with --cpu-bind=none, as sbatch/rl.sbatch does",
        )  # fmt: skip
    return _ok("cpus", f"{usable} CPUs usable" + (f", {granted} granted" if granted else ""))


def limit_checks() -> Iterator[Finding]:
    """Open files and locked memory."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FILES_NEEDED:
        yield Finding(
            check="nofile", level="fail" if files < 1024 else "warn", text=f"hard limit of open files is {files}",
            remedy=f"submit with --propagate=NONE, or have the site allow {FILES_NEEDED}",
        )  # fmt: skip
    else:
        yield _ok("nofile", "open files are not limited below what is needed")
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        yield Finding(
            check="memlock", level="warn", text=f"locked memory is limited to {locked} bytes, and there is InfiniBand",
            remedy="submit with --propagate=NONE, or have the site set memlock to unlimited",
        )  # fmt: skip


def scratch_check(candidates: Sequence[str]) -> Finding:
    """The first directory that workers would get for temporary files: space, and whether programs run from it."""
    refused = []
    for name in dict.fromkeys(filter(None, candidates)):
        why = _no_scratch(name)
        if why:
            refused.append(f"{name} ({why})")
            continue
        free = shutil.disk_usage(name).free
        if refused:
            return Finding(
                check="scratch", level="warn", text=f"{', '.join(refused)}: {name} is used instead",
                remedy="set cluster.scratch, or TMPDIR, to a local directory that programs can be run from",
            )  # fmt: skip
        if free < SCRATCH_NEEDED:
            return Finding(
                check="scratch", level="warn", text=f"{name} has {free >> 20} MiB free",
                remedy="set cluster.scratch to a larger local directory",
            )  # fmt: skip
        return _ok("scratch", f"{name}, {free >> 30} GiB free")
    return Finding(
        check="scratch", level="fail", text=f"no usable directory among {', '.join(refused)}",
        remedy="set cluster.scratch, or TMPDIR, to a local directory that programs can be run from",
    )  # fmt: skip


def _no_scratch(name: str) -> str:
    try:
        if os.statvfs(name).f_flag & os.ST_NOEXEC:
            return "mounted noexec"
        with tempfile.NamedTemporaryFile(dir=name):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def link_check(directory: Path, link: Callable[[Path, Path], None] = os.link) -> Finding:
    """link(2): what claims of attempts, epochs and commits rest on."""
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".doctor-") as place:
            source, target = Path(place) / "a", Path(place) / "b"
            source.write_text("x")
            link(source, target)
            try:
                link(source, target)
            except FileExistsError:
                return _ok("link", f"{directory} has link(2)")
            text = "link(2) replaced a file that existed"
    except OSError as error:
        text = error.strerror or str(error)
    return Finding(
        check="link", level="fail", text=f"{directory}: link(2) does not work: {text}",
        remedy="put run directories on another file system (NFS, Lustre, GPFS and BeeGFS with hard links work)",
    )  # fmt: skip


def lock_check(directory: Path) -> Finding:
    """flock(2); nothing of ours depends on it, libraries that cache files may."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding(
            check="lock", level="warn", text=f"{directory}: flock(2) does not work: {error.strerror}",
            remedy="keep caches of libraries (HF_HOME) on another file system",
        )  # fmt: skip
    return _ok("lock", f"{directory} has flock(2)")


def proxy_check(environ: Mapping[str, str]) -> Finding:
    """Proxies of the user's environment."""
    found = sorted(name for name in environ if name.lower() in _PROXIES and environ[name])
    if found and not (environ.get("no_proxy") or environ.get("NO_PROXY")):
        return Finding(
            check="proxy", level="warn", text=f"{', '.join(found)} is set without no_proxy",
            remedy="traffic of the run ignores it; libraries in your own code may send theirs there: set no_proxy",
        )  # fmt: skip
    return _ok("proxy", "no proxy stands between nodes")


def route_check(target: tuple[str, int] = _MODEL_HUB, timeout_s: float = 2.0) -> Finding:
    """Offline nodes are normal; the user should know."""
    error = _no_connection(target, timeout_s)
    if error:
        return Finding(
            check="hub_route", level="ok", text=f"no route to {target[0]} ({error}): an offline node",
            remedy="have model, tokenizer and data on the shared file system; set HF_HUB_OFFLINE=1",
        )  # fmt: skip
    return _ok("hub_route", f"{target[0]} can be reached")


def _no_connection(target: tuple[str, int], timeout_s: float) -> str:
    """Why there is no TCP connection to a place; empty when there is one.

    On a thread: looking up a name knows no time limit of ours, and takes long where no name server answers.
    """
    said: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(target, timeout_s).close()
            said.append("")
        except OSError as error:
            said.append(error.strerror or str(error))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return said[0] if said else f"no answer within {timeout_s:g} s"


def leftovers_check() -> Finding:
    """Processes of runs whose agent is gone."""
    table = procfs.snapshot()
    lost = []
    for process in table.values():
        mark, run_dir = procfs.mark_of(process.pid)
        # A worker's agent is its subreaper: a marked process below pid 1 has outlived both agent and warden.
        if mark and "/warden/" not in mark and process.ppid == 1:
            lost.append(f"{process.pid} of {run_dir}")
    if lost:
        return Finding(
            check="leftovers", level="warn", text=f"processes of dead runs: {', '.join(lost[:5])}",
            remedy="kill them, or resume the run: its agent does",
        )  # fmt: skip
    return _ok("leftovers", "no process of a dead run")


def interface_check() -> Finding:
    """Networks on which other nodes may reach this one."""
    names = sorted({name for name, address in addresses() if not address.startswith(_LOCAL)})
    if not names:
        return Finding(
            check="interfaces", level="fail", text="there is no network interface with an address of its own",
            remedy="ask the site; a run on this machine alone works with `miles-hpc run`",
        )  # fmt: skip
    return _ok("interfaces", ", ".join(names))


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of NVIDIA's kernel module; empty without one."""
    try:
        match = _DRIVER.search(path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def own_report(index: int, directory: Path, port: int) -> NodeReport:
    """Everything that one node says of itself."""
    found = list(node_checks(directory))
    names: list[str] = []
    try:
        names = [gpu.name or gpu.uuid for gpu in gpus.find(os.environ, wanted=False)]
    except gpus.GpuError as error:
        found.append(
            Finding(check="gpus", level="fail", text=str(error), remedy="ask for whole GPUs, without MIG, of NVIDIA")
        )
    return NodeReport(
        host=socket.gethostname(),
        index=index,
        findings=found,
        addresses=[address for _, address in addresses() if not address.startswith(_LOCAL)],
        port=port,
        wall_s=time.time(),
        gpus=names,
        driver=driver_version(),
    )


# ------------------------------------------------------------------------------------------ the fleet
def fleet_checks(reports: Sequence[NodeReport], skews: Mapping[str, float]) -> Iterator[Finding]:
    """What only shows when nodes are compared. `skews` are seconds that a node's clock differs from node 0's."""
    for host, skew in skews.items():
        if abs(skew) > SKEW_WARN_S:
            yield Finding(
                check="clock", level="fail" if abs(skew) > SKEW_FAIL_S else "warn", node=host,
                text=f"its clock differs by {skew:+.1f} s from the first node's",
                remedy="have the site run chrony or ntpd there; the run itself counts on no wall clock",
            )  # fmt: skip
    kinds = {tuple(report.gpus) for report in reports}
    if len(kinds) > 1:
        shown = "; ".join(f"{report.host}: {len(report.gpus)} x {(report.gpus or ['none'])[0]}" for report in reports)
        yield Finding(
            check="gpus", level="warn", text=f"nodes differ in their GPUs: {shown}",
            remedy="use slurm.constraint or slurm.exclude to get equal nodes",
        )  # fmt: skip
    if len({report.driver for report in reports}) > 1:
        shown = "; ".join(f"{report.host}: {report.driver or 'none'}" for report in reports)
        yield Finding(
            check="driver", level="warn", text=f"nodes differ in their GPU drivers: {shown}",
            remedy="use slurm.constraint or slurm.exclude to get equal nodes, or ask the site",
        )  # fmt: skip
    if not any(abs(skew) > SKEW_WARN_S for skew in skews.values()):
        yield _ok("clock", f"clocks of {len(reports)} nodes agree")
