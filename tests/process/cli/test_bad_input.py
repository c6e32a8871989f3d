"""Every bad input is one line with file, key and remedy, exit code 2, and nothing started or made."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process


def missing_prompts(place) -> list[str]:
    return ["--set", "data.prompts=promts.jsonl"]


def broken_line(place) -> list[str]:
    place.write("prompts.jsonl", '{"prompt": "a", "label": "b"}\n\n{"prompt": "a", "label"\n')
    return []


def line_without_the_key(place) -> list[str]:
    place.write("prompts.jsonl", '{"prompt": "a", "label": "b"}\n{"question": "a", "label": "b"}\n')
    return []


def no_rows(place) -> list[str]:
    place.write("prompts.jsonl", "\n\n")
    return []


def evaluated_file_is_missing(place) -> list[str]:
    place.write("my.toml", (place.path / "my.toml").read_text() + '[eval.datasets.hard]\ndata = "hard.jsonl"\n')
    return []


def nothing_was_saved(place) -> list[str]:
    return ["--set", "rollout.load_debug=rollouts"]


def wrong_key(place) -> list[str]:
    place.write("my.toml", (place.path / "my.toml").read_text() + "[rollout]\nbatchsize = 3\n")
    return []


def broken_toml(place) -> list[str]:
    place.write("my.toml", "steps = = 3\n")
    return []


def wrong_type(place) -> list[str]:
    return ["--set", "rollout.batch_size=many"]


def model_without_tokenizer(place) -> list[str]:
    model = place.path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return ["--set", "model.path=model"]


def no_model(place) -> list[str]:
    return ["--set", "model.path=nowhere"]


def model_and_make(place) -> list[str]:
    return ["--set", "model.make.layers=2"]


def reward_without_module(place) -> list[str]:
    return ["--set", "reward.function=no_such_module:score"]


def reward_without_function(place) -> list[str]:
    place.write("my_reward.py", "def other(): ...\n")
    return ["--set", "reward.function=my_reward:score"]


def reward_that_raises(place) -> list[str]:
    place.write("my_reward.py", "raise RuntimeError('two\\nlines')\n")
    return ["--set", "reward.function=my_reward:score"]


def batches_that_do_not_divide(place) -> list[str]:
    return ["--set", "rollout.batch_size=7", "--set", "rollout.samples_per_prompt=1"]


def sessions_without_server(place) -> list[str]:
    return ["--set", "rollout.session_every=2", "--set", "session.servers=0"]


def no_interpreter(place) -> list[str]:
    return ["--set", "runtimes.router.python=/no/such/python"]


def interpreter_without_router(place) -> list[str]:
    # An interpreter of its own with nothing installed: -S leaves the site packages out.
    python = place.write("bare-python", f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    return ["--set", f"runtimes.router.python={python}"]


def parquet_that_is_none(place) -> list[str]:
    place.write("prompts.parquet", "not parquet")
    return ["--set", "data.prompts=prompts.parquet"]


def no_chat_template(place) -> list[str]:
    return ["--set", "model.chat_template=none.jinja"]


CASES: list[tuple[Callable, list[str]]] = [
    (missing_prompts, ["--set: data.prompts", "promts.jsonl", "did you mean 'prompts.jsonl'"]),
    (broken_line, ["my.toml: data.prompts", "prompts.jsonl", "line 3", "correct or remove"]),
    (line_without_the_key, ["my.toml: data.prompts", "line 2", "'prompt'", "set data.prompt_key"]),
    (no_rows, ["my.toml: data.prompts", "prompts.jsonl", "no rows"]),
    (evaluated_file_is_missing, ["my.toml: eval.datasets.hard.data", "hard.jsonl", "no such file"]),
    (nothing_was_saved, ["--set: rollout.load_debug", "holds no saved rollouts", "rollout.save_debug"]),
    (wrong_key, ["my.toml: unknown key 'rollout.batchsize'", "did you mean 'rollout.batch_size'"]),
    (broken_toml, ["my.toml: not valid TOML", "line 1"]),
    (wrong_type, ["--set: rollout.batch_size", "expected integer >= 1", "'many'"]),
    (model_without_tokenizer, ["--set: model.path", "tokenizer.json", "missing", "save_pretrained"]),
    (no_model, ["--set: model.path", "nowhere", "no such directory", "[model.make]"]),
    (model_and_make, ["my.toml and --set: model.path", "model.make", "drop one"]),
    (reward_without_module, ["--set: reward.function", "no_such_module", "ModuleNotFoundError", "python_path"]),
    (reward_without_function, ["--set: reward.function", "my_reward:score", "AttributeError"]),
    (reward_that_raises, ["--set: reward.function", "my_reward:score", "does not import"]),
    (
        batches_that_do_not_divide,
        ["--set: rollout.batch_size = 7", "train.ranks = 2", "set rollout.batch_size to 6 or 8"],
    ),
    (sessions_without_server, ["rollout.session_every", "session.servers", "set session.servers"]),
    (no_interpreter, ["--set: runtimes.router.python", "/no/such/python", "no such program"]),
    (interpreter_without_router, ["sglang_router", "bare-python", "pip install 'miles-hpc[router]'"]),
    (parquet_that_is_none, ["--set: data.prompts", "prompts.parquet", "not a parquet file"]),
    (no_chat_template, ["--set: model.chat_template", "none.jinja", "no such file"]),
]


def refused(place, done, parts: list[str]) -> None:
    """One line, exit code 2, no run directory, no registry entry, no process."""
    assert done.returncode == 2, done.stderr + done.stdout
    assert done.stdout == ""
    assert done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert not place.run_dir.exists()
    assert not (place.path / "state").exists() and not (place.path / "runs").exists()
    assert processes_in(place.path) == []


def processes_in(path: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("XDG_STATE_HOME", "").startswith(str(path)):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("prepare", "parts"), CASES, ids=[prepare.__name__ for prepare, _ in CASES])
def test_bad_input_is_refused_in_one_line(workplace, prepare, parts):
    refused(workplace, workplace.run(*prepare(workplace)), parts)


def test_a_busy_router_port_is_refused_with_its_holder(workplace):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = workplace.run("--set", f"inference.router_port={port}")
    refused(
        workplace, done, ["--set: inference.router_port", f"port {port} is in use by pid {os.getpid()}", "0 for a free"]
    )


def test_the_port_of_a_later_session_server_is_looked_at_too(workplace):
    while True:
        listener, before = socket.socket(), socket.socket()
        listener.bind(("0.0.0.0", 0))
        port = listener.getsockname()[1]
        with before:
            try:
                before.bind(("0.0.0.0", port - 1))
                break
            except OSError:  # somebody else's: it would be named in place of the later one
                listener.close()
    with listener:
        listener.listen()
        done = workplace.run("--set", f"session.port={port - 1}")
    refused(workplace, done, ["--set: session.port", f"port {port} is in use"])


def test_an_unwritable_run_directory_is_refused(workplace):
    blocker = workplace.write("blocker", "a file")
    done = workplace.call("run", "my.toml", "--run-dir", str(blocker / "run"))
    refused(workplace, done, ["--run-dir", str(blocker / "run"), "cannot be written", "choose a directory"])
    done = workplace.call("run", "my.toml", "--run-dir", "/proc/miles-hpc-run")
    refused(workplace, done, ["--run-dir '/proc/miles-hpc-run'", "cannot be written"])


def test_a_directory_without_a_run_cannot_be_resumed(workplace):
    refused(workplace, workplace.run("--resume"), ["--run-dir", "holds no run to resume", "drop --resume"])
    done = workplace.call("run", "my.toml", "--resume")
    refused(workplace, done, ["--resume needs --run-dir"])


def test_a_directory_with_a_run_needs_resume(workplace):
    claim = workplace.run_dir / "attempts" / "0.json"
    claim.parent.mkdir(parents=True)
    claim.touch()
    done = workplace.run()
    assert set(workplace.run_dir.rglob("*")) == {claim, claim.parent}
    shutil.rmtree(workplace.run_dir)
    refused(workplace, done, ["--run-dir", "holds a run already", "--resume"])


def test_no_file_and_an_unknown_recipe_are_refused(workplace):
    refused(workplace, workplace.call("run"), ["name a recipe or a run file"])
    refused(workplace, workplace.call("run", "no-such-recipe"), ["no-such-recipe", "no such run file", "recipes are"])


def test_dry_run_prints_config_placement_and_commands_and_starts_nothing(workplace):
    done = workplace.run("--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    for part in ("[rollout]", "# placement", "node-00001  127.0.0.3", "start_router.py", "run_driver"):
        assert part in done.stdout
    assert not workplace.run_dir.exists() and not (workplace.path / "state").exists()
    assert processes_in(workplace.path) == []


def test_dry_run_refuses_bad_input_too(workplace):
    refused(workplace, workplace.run("--dry-run", "--set", "data.prompts=none.jsonl"), ["data.prompts", "none.jsonl"])


def test_status_and_cells_of_no_run_are_refused(workplace):
    for verb in ("status", "cells"):
        refused(workplace, workplace.call(verb), ["no run is going on here"])
        refused(
            workplace, workplace.call(verb, "some-id", "--json"), ["some-id", "no run directory and no run of that id"]
        )


def test_help_is_there_in_a_moment(workplace):
    def cpu_s():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    costs = []
    for _ in range(3):
        before = cpu_s()
        done = workplace.call("--help")
        costs.append(cpu_s() - before)
        assert done.returncode == 0 and "run a recipe" in done.stdout
    # 200 ms is what a person notices. CPU time, since this machine may do much else.
    assert min(costs) < 0.2
