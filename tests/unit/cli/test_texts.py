"""What the command says at the end, and how it finds a run."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from miles_hpc.cli import run as run_module
from miles_hpc.cli.exits import one_line
from miles_hpc.cli.logs import LogFile
from miles_hpc.cli.preflight import claim_run_dir, port_holder
from miles_hpc.cli.run import _again, closing_lines, default_run_dir, last_line, newest_checkpoint
from miles_hpc.cli.source import find_run
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import load
from miles_hpc.config.schema import Config
from miles_hpc.launch.allocation import JobKey
from miles_hpc.launch.attempts import claim_attempt, register
from miles_hpc.launch.preparation import Prepared, say_prepared

pytestmark = pytest.mark.unit


def arguments(**given) -> argparse.Namespace:
    return argparse.Namespace(**{"files": [], "sets": [], "run_dir": "", "resume": False, "dry_run": False, **given})


def test_the_last_line_has_cause_log_and_next_command(tmp_path):
    log = tmp_path / "driver.log"
    log.write_text("Traceback …\n  File\nValueError: no good\n\n")
    line = last_line({"outcome": "failed", "reason": f"cell driver-00000 ended\nbadly; log {log}"}, tmp_path, "NEXT")
    assert line == f"miles-hpc: failed: cell driver-00000 ended badly (ValueError: no good); log {log}; next: NEXT"


def test_the_last_line_points_at_all_logs_where_the_cause_has_none(tmp_path):
    line = last_line({"outcome": "cancelled", "reason": "cancelled by SIGINT"}, tmp_path, "NEXT")
    assert line == f"miles-hpc: cancelled: cancelled by SIGINT; log {tmp_path}/logs/latest; next: NEXT"
    assert "no reason was given" in last_line({}, tmp_path, "NEXT")


def test_the_next_command_can_be_pasted_into_a_shell(tmp_path):
    again = _again(arguments(files=["my run.toml"], sets=["name=a b"]), tmp_path)
    assert again == f"miles-hpc run 'my run.toml' --set 'name=a b' --run-dir {tmp_path} --resume"


def test_closing_lines_name_only_what_exists(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for name in ("10.g1-1", "5.g1-1", "10.g1-2", "x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    os.utime(tmp_path / "checkpoints" / "10.g1-1", (0, 0))
    lines = closing_lines(
        {
            "outcome": "finished",
            "steps": 10,
            "reward": {"first": 0.123456, "last": 1.0, "best": 1.0},
            "heldout": {"first": 0.1, "last": 0.9},
            "groups": {"dispatched": 9, "committed": 8, "returned": 0, "dropped": {"reason": 1}},
        },
        tmp_path,
        {},
    )
    text = "\n".join(lines)
    assert "finished after 10 steps, reward 0.1235 -> 1 (best 1)" in text
    assert "held-out accuracy 0.1 -> 0.9" in text
    assert "9 dispatched, 8 committed, 0 returned, 1 dropped (reason 1)" in text
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "10.g1-2"
    assert [line.split()[0] for line in lines[-2:]] == ["checkpoint", "metrics"]


def test_closing_lines_of_an_evaluation_have_one_accuracy(tmp_path):
    lines = closing_lines({"outcome": "finished", "steps": 0, "heldout": {"first": 0.5, "last": 0.5}}, tmp_path, {})
    assert "held-out accuracy 0.5" in lines


def test_closing_lines_of_a_run_without_a_summary(tmp_path):
    assert "failed after 0 steps" in closing_lines({}, tmp_path, {})[1]


def test_an_error_of_our_own_before_the_start_ends_with_one_line_and_code_1(monkeypatch, capsys):
    def broken(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does that is out of memory

    monkeypatch.setattr(run_module, "preflight", broken)
    broken.__name__ = "preflight"
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_module.run(arguments(files=["smoke"])) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "miles-hpc: failed: nothing was started: preflight ended with -9 and said nothing"


def test_the_end_of_a_log_is_found_behind_a_line_of_any_length(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"first\n" + b"progress\r" * 3_000_000 + b"\nlast\nbegun")
    log = LogFile(path, "engine", "node-00000", None)
    reads, opened = [], Path.open

    class Counted:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, *where):
            return self.file.seek(*where)

        def read(self, size):
            reads.append(size)
            return self.file.read(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode: Counted(opened(self, mode)))
        found = log.tail(2)
    assert [found[0][:9], found[1], log.rest] == ["progress\r", "last", b"begun"]
    assert sum(reads) < 4 * path.stat().st_size, "what was read is not read again and again"


def test_a_run_directory_is_named_after_the_run_and_never_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load([], ["name=my/run ü"])
    first, second = default_run_dir("", config), default_run_dir("", config)
    assert first != second and first.parent == tmp_path / "runs" and first.name.startswith("my-run-2")
    assert default_run_dir("", load([], ["name=///"])).name.startswith("run-2")
    assert default_run_dir("here", Config()) == tmp_path / "here"


def test_a_claimed_run_directory_is_made_and_an_existing_run_needs_resume(tmp_path):
    assert claim_run_dir(tmp_path / "a" / "b", resume=False)
    assert not claim_run_dir(tmp_path / "a" / "b", resume=False)
    claim_attempt(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="holds a run already: add --resume"):
        claim_run_dir(tmp_path / "a" / "b", resume=False)
    assert not claim_run_dir(tmp_path / "a" / "b", resume=True)


def test_what_a_refused_job_has_left_is_no_run(tmp_path):
    say_prepared(tmp_path, JobKey(job_id="7"), "0", Prepared(error="a bad key", exit_code=2))
    assert not claim_run_dir(tmp_path, resume=False)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        claim_run_dir(tmp_path, resume=True)


def test_a_run_is_found_by_directory_by_id_and_as_the_only_living_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigError, match="no run is going on here"):
        find_run("")
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    register(run_dir, claim_attempt(run_dir))
    assert find_run("") == find_run("my-run") == find_run(str(run_dir)) == run_dir
    other = tmp_path / "other"
    other.mkdir()
    register(other, claim_attempt(other))
    with pytest.raises(ConfigError, match="2 runs are going on"):
        find_run("")
    with pytest.raises(ConfigError, match="known runs are other, my-run"):
        find_run("third")


def test_a_free_port_has_no_holder():
    assert port_holder(0) == ""


def test_a_text_from_elsewhere_cannot_break_a_line():
    assert one_line("a\n\tb\r\n c ") == "a b c"
