"""What goes to sbatch and srun, as text; and what is refused before it goes there."""

import shlex
import subprocess

import pytest

from miles_hpc.config.errors import ConfigError, ConflictError
from miles_hpc.config.load import load
from miles_hpc.config.schema import ContainerConfig, SlurmConfig
from miles_hpc.launch import slurm_options, submission
from miles_hpc.launch.slurm_commands import SlurmError, call, down_nodes, moment, scrubbed, seconds_of, squeue

pytestmark = pytest.mark.unit


def script(run_dir, *sets: str) -> str:
    return submission.script(load(["smoke"], list(sets)), run_dir)


@pytest.fixture(autouse=True)
def _srun_is_there(tmp_path, monkeypatch):
    """submitit looks for it, and nothing here calls it."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "sbatch"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_the_script_has_what_keeps_a_run_alive_and_ends_as_the_hub_says(tmp_path):
    text = script(tmp_path / "run", "slurm.nodes=3", 'slurm.setup=["module load cuda", "source venv/bin/activate"]')
    lines = text.splitlines()
    for line in ("#SBATCH --nodes=3", "#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --propagate=NONE",
                 "#SBATCH --open-mode=append", "#SBATCH --signal=USR2@180", "#SBATCH --exclusive"):  # fmt: skip
        assert line in lines
    assert "wckey" not in text and "--time" not in text
    assert lines.index("module load cuda") < lines.index("source venv/bin/activate")
    (srun,) = (line for line in lines if line.startswith("srun "))
    words = shlex.split(srun)
    assert set(slurm_options.SRUN) <= set(words)
    assert not any(word.startswith("--cpus-per-task") for word in words), "whole nodes: the step has all their CPUs"
    after = lines[lines.index(srun) + 1 :]
    assert next(line for line in after if line and not line.startswith("#")) == "rc=$?"
    assert after[-1] == 'exit "$rc"'


@pytest.mark.parametrize("name", ["plain", "a b", "it's", '"quoted"', "$HOME;`ls`", "ü&|"])
def test_the_script_is_shell_and_its_ending_finds_the_files_whatever_the_directory_s_name(tmp_path, name):
    run_dir = tmp_path / name
    text = script(run_dir)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    (run_dir / "verdicts").mkdir(parents=True)
    (run_dir / "verdicts" / "7.1.rc").write_text("75\n")
    ending = "\n".join(["false", *slurm_options.ending(run_dir)])
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": "/usr/bin:/bin"}
    assert subprocess.run(["bash", "-c", ending], env=environ, check=False).returncode == 75
    environ["SLURM_RESTART_COUNT"] = "0"
    assert subprocess.run(["bash", "-c", ending], env=environ, check=False).returncode == 1, "srun's own code"


def test_the_ending_asks_for_a_requeue_when_the_hub_did(tmp_path):
    (tmp_path / "run" / "verdicts").mkdir(parents=True)
    (tmp_path / "run" / "verdicts" / "7.0.requeue").write_text("why\n")
    (tmp_path / "bin" / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", "\n".join(slurm_options.ending(tmp_path / "run"))],
        env={"SLURM_JOB_ID": "7", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("requeue 7\n", 0)


def test_shared_nodes_name_their_cpus_to_sbatch_and_to_srun(tmp_path):
    text = script(tmp_path / "run", "slurm.cpus_per_node=8", "slurm.gpus_per_node=4", "slurm.memory=90G")
    assert "#SBATCH --cpus-per-task=8" in text and "--cpus-per-task=8 " in text.split("srun ", 1)[1]
    assert "#SBATCH --gpus-per-node=4" in text and "#SBATCH --mem=90G" in text and "--exclusive" not in text


def test_additional_options_go_through_and_those_of_the_run_are_refused():
    config = SlurmConfig(additional={"comment": "a b", "nice": 10, "hold": True})
    found = slurm_options.sbatch_options(config, "n")
    assert (found["comment"], found["nice"], found["hold"]) == ("a b", 10, True)
    with pytest.raises(ConflictError, match=r"slurm\.additional\.no_kill is decided by the run: leave it out"):
        slurm_options.sbatch_options(SlurmConfig(additional={"no_kill": False}), "n")


@pytest.mark.parametrize("key", ["mem_per_cpu", "mem-per-gpu"])
def test_memory_by_cpu_or_gpu_takes_the_place_of_that_of_a_node(key):
    found = slurm_options.sbatch_options(SlurmConfig(additional={key: "4G"}), "n")
    assert "mem" not in found and found[key.replace("_", "-")] == "4G"


def test_a_pyxis_container_is_options_of_srun(tmp_path):
    box = ContainerConfig(
        kind="pyxis", image="/images/a b.sqsh", mounts=["/data:/data:ro"], arguments=["--container-writable"]
    )
    assert slurm_options.pyxis_options(box, tmp_path) == [
        "--container-image=/images/a b.sqsh",
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data:ro",
        "--no-container-remap-root",
        "--no-container-entrypoint",
        "--container-writable",
    ]
    assert slurm_options.apptainer_command(box, tmp_path, True) == []
    assert slurm_options.python_in(box, "/here/python") == "python3"


def test_an_apptainer_container_wraps_the_node_s_command(tmp_path):
    box = ContainerConfig(
        kind="apptainer", image="/i.sif", mounts=["/data:/data"], python="/opt/python", arguments=["-C"]
    )
    config = load(["smoke"], [])
    config = config.__class__(slurm=SlurmConfig(container=box, gpus_per_node=1))
    assert submission.node_command(config, tmp_path, False) == [
        "apptainer", "exec", "--nv", "--bind", f"{tmp_path}:{tmp_path}", "--bind", "/data:/data", "-C", "/i.sif",
        "/opt/python", "-m", "miles_hpc.cli", "agent", f"{tmp_path}/submitted.toml", "--run-dir", str(tmp_path),
    ]  # fmt: skip
    assert slurm_options.pyxis_options(box, tmp_path) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [("", None), ("30", 30), ("90:30", 91), ("1:30:00", 90), ("1-0", 1440), ("2-12:30", 3630), ("0:10", 1), ("0", 0)],
)
def test_time_limits_in_slurm_s_forms(text, found):
    assert submission.minutes(text) == found


def test_a_time_limit_in_another_form_is_refused():
    with pytest.raises(ConfigError, match=r'slurm\.time = "2h"'):
        submission.minutes("2h")


def test_the_file_system_of_a_path_is_that_of_its_innermost_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nsrv:/x /tmp/my\\040home nfs4 rw 0 0\n")
    from pathlib import Path

    assert submission.file_system_of(Path("/var/x"), mounts) == "ext4"
    assert submission.file_system_of(Path("/tmp/x"), mounts) == "tmpfs"
    assert submission.file_system_of(Path("/tmp/my home/run"), mounts) == "nfs4"


@pytest.mark.parametrize("name", ["100%", "a\nb", "a\\b"])
def test_a_directory_that_slurm_cannot_write_to_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="Slurm cannot write its output there"):
        submission.check_site(tmp_path / name)


def test_nothing_of_a_surrounding_job_is_left_in_the_environment():
    environ = {
        "SLURM_CPU_BIND": "x",
        "SBATCH_PARTITION": "p",
        "PMI_RANK": "1",
        "PMIX_ID": "2",
        "SLURM_CONF": "/c",
        "A": "b",
    }
    assert scrubbed(environ) == {"SLURM_CONF": "/c", "A": "b"}


def test_times_and_settings_as_slurm_prints_them():
    assert moment("N/A") is None and moment("Unknown") is None
    assert moment("2026-01-02T03:04:05") is not None
    assert (seconds_of("30 sec", 5), seconds_of("", 5)) == (30, 5)


_SHOWN = {
    # as sinfo shows it: (State of `scontrol show node`, whether the node is down)
    "down": ("DOWN", True), "down*": ("DOWN+NOT_RESPONDING", True), "down~": ("DOWN+POWERED_DOWN", True),
    "down#": ("DOWN+POWERING_UP", True), "down!": ("DOWN+POWER_DOWN", True), "down%": ("DOWN+POWERING_DOWN", True),
    "down$": ("DOWN+MAINT", True), "down@": ("DOWN+REBOOT_REQUESTED", True), "down^": ("DOWN+REBOOT_ISSUED", True),
    "drained*": ("DOWN+DRAIN+NOT_RESPONDING", True), "drained~": ("DOWN*+DRAIN", True),
    "drained": ("IDLE+DRAIN", False), "drained@": ("IDLE+DRAIN+REBOOT_REQUESTED", False),
    "draining*": ("ALLOCATED+DRAIN+NOT_RESPONDING", False), "draining": ("DOWN+COMPLETING+DRAIN", True),
    "fail*": ("DOWN+FAIL+NOT_RESPONDING", True), "failing": ("ALLOCATED+FAIL", False),
    "reboot^": ("DOWN+REBOOT_ISSUED", True), "maint*": ("DOWN*+MAINT", True), "maint": ("IDLE+MAINT", False),
    "idle*": ("IDLE+NOT_RESPONDING", False), "idle~": ("IDLE+POWERED_DOWN", False), "mixed-": ("MIXED+PLANNED", False),
    "allocated+": ("ALLOCATED+COMPLETING", False), "mixed$": ("MIXED+MAINT", False), "planned": ("IDLE+PLANNED", False),
    "inval": ("IDLE+INVALID_REG", False), "unknown*": ("UNKNOWN+NOT_RESPONDING", False),
}  # fmt: skip


def _nodes(tmp_path, scontrol: str = "") -> dict[str, str]:
    """Node -> its state for people, of a cluster whose sinfo and scontrol speak as the real ones do."""
    nodes = {f"n{number}": shown for number, shown in enumerate(_SHOWN)}
    # sinfo has a line for each partition that a node is in.
    rows = "".join(f"{name}|{shown}\n" * 2 for name, shown in nodes.items())
    (tmp_path / "rows").write_text(rows)
    lines = [
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1 OS=Linux 6.1 #1 SMP  State={_SHOWN[shown][0]} ThreadsPerCore=1"
        for name, shown in nodes.items()
    ]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    (tmp_path / "bin" / "sinfo").write_text(f"#!/bin/sh\ncat {tmp_path}/rows\n")
    # The names come as one word with commas.
    answer = f'for name in $(echo "$4" | tr , " "); do grep "^NodeName=$name " {tmp_path}/lines; done'
    (tmp_path / "bin" / "scontrol").write_text(scontrol or f"#!/bin/sh\n{answer}\n")
    for name in ("sinfo", "scontrol"):
        (tmp_path / "bin" / name).chmod(0o755)
    return nodes


def test_a_node_is_down_whatever_else_was_decided_about_it(tmp_path):
    nodes = _nodes(tmp_path)
    assert down_nodes([*nodes, "unheard-of"]) == {name for name, shown in nodes.items() if _SHOWN[shown][1]}


def test_nodes_that_are_plainly_down_are_known_without_scontrol(tmp_path):
    nodes = _nodes(tmp_path, "#!/bin/sh\nexit 1\n")
    assert down_nodes([*nodes]) == {name for name, shown in nodes.items() if shown.startswith("down")}
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SlurmError, match="sinfo ended with 1"):
        down_nodes([*nodes])


def test_a_user_s_own_defaults_for_slurm_s_commands_do_not_reach_those_of_a_run(tmp_path, monkeypatch):
    # Filters would hide the job, another format its end time, and a question would be answered by nobody.
    (tmp_path / "bin" / "squeue").write_text(
        '#!/bin/sh\n[ -z "$SQUEUE_PARTITION" ] || exit 0\n'
        '[ "$SLURM_TIME_FORMAT" = relative ] && end="Today 15:00" || end=2026-01-02T03:04:05\n'
        'echo "7|RUNNING|0|$end|node1|None|"\n'
    )
    (tmp_path / "bin" / "scancel").write_text('#!/bin/sh\n[ -z "$SCANCEL_INTERACTIVE" ] && echo "$SLURM_CLUSTERS"\n')
    for name in ("squeue", "scancel"):
        (tmp_path / "bin" / name).chmod(0o755)
    for name, value in (("SQUEUE_PARTITION", "debug"), ("SLURM_TIME_FORMAT", "relative"),
                        ("SCANCEL_INTERACTIVE", "1"), ("SLURM_CLUSTERS", "second")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert squeue(["7"])["7"].end == moment("2026-01-02T03:04:05")
    assert call(["scancel", "7"]) == "second\n", "which cluster is meant stays"


@pytest.mark.parametrize(
    ("reason", "taken_back"),
    [("PartitionTimeLimit", True), ("QOSMaxNodePerJobLimit", True), ("Priority", False), ("AssocGrpGRES", False),
     ("ReqNodeNotAvail", False), ("PartitionNodeLimit", False), ("AccountingPolicy", False)],
)  # fmt: skip
def test_only_a_job_that_no_waiting_helps_is_taken_back(tmp_path, reason, taken_back):
    said = shlex.quote(str(tmp_path / "said"))
    for name, text in (("squeue", f"echo '7|PENDING|0|N/A|n/a|{reason}|'"), ("scancel", f'echo "$@" >{said}')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    if taken_back:
        with pytest.raises(ConfigError, match=f"would never start the job \\({reason}\\)"):
            submission._refuse_hopeless("7")
    else:
        submission._refuse_hopeless("7")
    assert (tmp_path / "said").exists() is taken_back
