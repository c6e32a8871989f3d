"""A real Slurm of four nodes for the whole session, jobs on it, and what must be true after each of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import pytest

from tests.conftest import unaccounted

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "slurm-cluster"
RL, JOIN = ROOT / "sbatch" / "rl.sbatch", ROOT / "sbatch" / "join.sbatch"
NODES = ("node1", "node2", "node3", "node4")
SHAPE = ("--nodes", str(len(NODES)), "--conf", "TaskPlugin=task/affinity", "--conf", "WaitTime=5")
"""Both settings have broken runs elsewhere: one core for a node, and a clean exit of one task that ends the others."""
BED = Path(os.environ.get("MILES_HPC_SLURM_BASE", "/tmp/miles-hpc-slurm"))
"""Where the tool keeps its state: one bed a machine."""
LOCK_PATIENCE_S = 550.0
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}


def wait_until(what: str, probe: Callable[[], T], timeout_s: float, every_s: float = 0.2) -> T:
    """The first true answer of `probe`; an AssertionError that names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)


FIGURES: list[str] = []
SLACK = 2.0
"""The bounds hold on an idle machine; the machine that tests run on is not."""


def figure(what: str, seconds: float, bound_s: float) -> None:
    """Note how long something took, and hold it to its bound, with slack for what else the machine does."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    FIGURES.append(f"{what}: {seconds:.1f} s (at most {bound_s:g} s on an idle machine; load {load:.1f} per core)")
    assert seconds <= bound_s * max(SLACK, load), FIGURES[-1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in FIGURES:
        terminalreporter.write_line(f"figure: {line}")


def command(*argv: str | Path, timeout_s: float = 60.0, check: bool = True, **kwargs: Any) -> str:
    done = subprocess.run(
        [str(part) for part in argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
        **kwargs,
    )
    if check:
        assert done.returncode == 0, f"{argv[0]} ended with {done.returncode}: {done.stderr}{done.stdout}"
    return done.stdout


class Process(NamedTuple):
    """A process of a run. `worker` is empty for wardens, agents and hubs."""

    pid: int
    node: str
    worker: str
    words: str


class Job:
    """A submitted job and its run directory."""

    def __init__(self, job_id: str, run_dir: Path, output: Path | None = None) -> None:
        self.id, self.run_dir, self.output = job_id, run_dir, output
        self._last_state = "PENDING"

    def state(self) -> str:
        """What squeue says, or said last where it does not answer; empty once slurmctld has forgotten the job."""
        try:
            self._last_state = command("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T").strip()
        except AssertionError as error:
            if "Invalid job id" in str(error):
                self._last_state = ""
        return self._last_state

    def in_queue(self) -> bool:
        return self.state() in ALIVE

    def wait(self, timeout_s: float) -> str:
        """Wait until the job has left the queue for good. Returns its state in the accounting."""
        wait_until(f"job {self.id} has ended, it is {self.state()}", lambda: not self.in_queue(), timeout_s)
        assert unaccounted(self.run_dir) == []
        return self.accounted()[0]

    def accounted(self) -> tuple[str, str]:
        """(state, exit code) of the newest start in the accounting, which lags a little."""

        def row() -> tuple[str, str] | None:
            text = command("sacct", "-n", "-X", "-P", "-j", self.id, "-o", "State,ExitCode", check=False).strip()
            state, _, code = (text.splitlines() or [""])[-1].partition("|")
            return (state.split()[0], code) if state and state.split()[0] not in ALIVE else None

        return wait_until(f"job {self.id} is accounted for", row, 30)

    def steps(self) -> int:
        """Steps that metrics.jsonl shows."""
        return max((row["step"] for row in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def wait_steps(self, count: int, timeout_s: float = 90.0) -> None:
        def enough() -> bool:
            assert self.in_queue(), f"job {self.id} is {self.state()} before step {count}: {self.said()}"
            return self.steps() >= count

        wait_until(f"step {count} of job {self.id}, at {self.steps()}", enough, timeout_s)

    def verdict(self, attempt: int = 0, timeout_s: float = 0.0) -> dict[str, Any]:
        path = self.run_dir / "verdicts" / f"attempt-{attempt}.json"
        wait_until(f"{path}; the job said: {self.said()}", path.exists, timeout_s)
        return json.loads(path.read_text())

    def attempts(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.run_dir / "attempts").glob("*.json") if path.stem.isdigit())

    def ledger(self) -> list[tuple[Any, ...]]:
        """What must not depend on anything that happened to the run."""
        keys = ("step", "group", "prompt_index", "epoch", "samples", "digest")
        rows = read_lines(self.run_dir / "ledger.jsonl")
        return sorted(tuple(json.dumps(row.get(key)) if key == "samples" else row[key] for key in keys) for row in rows)

    def events(self, name: str, attempt: int = 0) -> list[dict[str, Any]]:
        rows = read_lines(self.run_dir / "logs" / f"attempt-{attempt}" / "hub.jsonl")
        return [row for row in rows if row.get("event") == name]

    def said(self) -> str:
        """The end of the batch script's output."""
        try:
            return self.output.read_text(errors="replace")[-1500:] if self.output else ""
        except OSError:
            return ""

    def processes(self) -> list[Process]:
        """Living processes of the run on any node: this machine sees into all of their pid namespaces."""
        wanted = f"MILES_HPC_RUN_DIR={self.run_dir}"
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if wanted in environ:
                values = dict(item.partition("=")[::2] for item in environ)
                node, worker = values.get("SLURMD_NODENAME", ""), values.get("MILES_HPC_WORKER", "")
                found.append(Process(int(entry.name), node, worker, words[:120]))
        return found

    def kill_worker(self, pool: str) -> None:
        """SIGKILL for the first process of a pool."""
        found = min((p for p in self.processes() if p.worker.startswith(pool)), key=lambda p: p.worker)
        os.kill(found.pid, signal.SIGKILL)

    def kill_agents(self) -> None:
        """SIGKILL for agents and wardens of all nodes at once: nobody of ours is left to clean up."""
        found = [p.pid for p in self.processes() if "warden.py" in p.words or "miles_hpc.agent.run" in p.words]
        assert len(found) >= 2, self.processes()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # the end of one ends others
                os.kill(pid, signal.SIGKILL)

    def step_started(self, attempt: int = 0) -> float:
        """Wall clock of when slurmstepd has started the first node's task, which is its warden by now."""
        first = next(row["host"] for row in self.events("agent_joined", attempt) if row["node"] == "node-00000")
        (pid,) = (p.pid for p in self.processes() if p.node == first and "warden.py" in p.words)
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age

    def wait_no_process(self, timeout_s: float) -> None:
        wait_until(f"no process of the run: {self.processes()}", lambda: not self.processes(), timeout_s)

    def node_of(self, cell: str) -> str:
        """Slurm's name of the node on which a cell runs now."""
        status = json.loads((self.run_dir / "status.json").read_text())
        node = next(row["node"] for row in status["cells"] if row["cell"] == cell)
        return next(row["host"] for row in status["nodes"] if row["node"] == node)


def read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return []
    # The last line may be half written.
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


class Bed:
    """The cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jobs: list[Job] = []
        self._shape: tuple[str, ...] = ()

    def tool(self, *arguments: str, timeout_s: float = 120.0) -> str:
        return command(TOOL, *arguments, timeout_s=timeout_s)

    def up(self, *shape: str) -> None:
        """Have a cluster of this shape; another one is rebuilt."""
        if shape != self._shape:
            self.tool("up", *shape, timeout_s=400)
            self._shape = shape

    def submit(
        self,
        *arguments: str,
        options: Sequence[str] = (),
        script: Path = RL,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Job:
        """`sbatch OPTIONS sbatch/rl.sbatch ARGUMENTS` as a user would, from a directory of its own."""
        cwd = cwd or self.folder
        output = cwd / "slurm-%j.out"
        job_id = command(
            "sbatch", "--parsable", f"--output={output}", *options, script, *arguments,
            cwd=cwd, env=user_environ(**(environ or {})),
        ).strip()  # fmt: skip
        job = Job(job_id, cwd / "runs" / f"miles-hpc-{job_id}", cwd / f"slurm-{job_id}.out")
        if "--run-dir" in arguments:
            job.run_dir = Path(arguments[arguments.index("--run-dir") + 1]).absolute()
        return self.adopt(job)

    def adopt(self, job: Job) -> Job:
        """Have a job that was submitted in another way ended with the test."""
        self._jobs.append(job)
        return job

    def clean(self) -> None:
        """End what a test has left in the queue, and bring every node back."""
        for job in self._jobs:
            if job.in_queue():
                command("scancel", job.id, check=False)
        for job in self._jobs:
            wait_until(f"job {job.id} has left the queue", lambda job=job: not job.in_queue(), 60)
        self._jobs.clear()

    def wait_nodes(self, count: int = len(NODES), timeout_s: float = 60.0) -> None:
        def idle() -> bool:
            names = command("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", check=False).split()
            return len(set(names)) == count

        wait_until(f"{count} idle nodes", idle, timeout_s)


def user_environ(**more: str) -> dict[str, str]:
    """A login shell's environment in which `miles-hpc` is found."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "MILES_HPC_"))
    }
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """One cluster for all tests; `MILES_HPC_KEEP_SLURM=1` leaves it up, for those who run one test after the other."""
    bed = Bed(tmp_path_factory.mktemp("slurm"))
    with BED.with_suffix(".lock").open("w") as lock:
        wait_until("other tests have left this machine's bed", lambda: _locked(lock), LOCK_PATIENCE_S, every_s=1)
        bed.up(*SHAPE)
        daemons = bed.tool("status")
        bed.tool("up", *SHAPE)
        assert _pids(bed.tool("status")) == _pids(daemons), "a second `up` starts nothing anew"
        yield bed
        if not os.environ.get("MILES_HPC_KEEP_SLURM"):
            running = _pids(bed.tool("status"))
            bed.tool("down")
            wait_until("every daemon is gone", lambda: not [pid for pid in running if _lives(pid)], 20)
            assert "mhslurm0" not in command("ip", "link") and not BED.exists(), "nothing is left behind"
            assert not Path("/etc/slurm/slurm.conf").exists()


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _pids(status: str) -> list[str]:
    return [line.split()[1] for line in status.splitlines() if len(line.split()) == 2 and line.split()[1].isdigit()]


@pytest.fixture
def bed(cluster: Bed, tmp_path: Path) -> Iterator[Bed]:
    """The cluster, with four idle nodes, and nothing in its queue afterwards."""
    cluster.folder = tmp_path
    cluster.up(*SHAPE)
    for node in NODES:
        cluster.tool("boot", node)
    cluster.wait_nodes()
    yield cluster
    cluster.clean()


SMOKE = ("smoke", "--set", "steps=40", "--set", "train.save_every=2")
LONG = ("smoke", "--set", "steps=80", "--set", "train.save_every=2")


@pytest.fixture(scope="session")
def undisturbed(cluster: Bed) -> list[tuple[Any, ...]]:
    """The ledger of 80 steps of smoke to which nothing happened."""
    job = cluster.submit(*LONG)
    assert job.wait(180) == "COMPLETED", job.said()
    return job.ledger()


def first_steps(ledger: list[tuple[Any, ...]], steps: int) -> list[tuple[Any, ...]]:
    """The part of a ledger that a shorter run has: the order of the data does not depend on how far it goes."""
    return [row for row in ledger if row[0] <= steps]
