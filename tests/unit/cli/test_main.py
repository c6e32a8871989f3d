from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from miles_hpc.cli.config import markdown
from miles_hpc.cli.main import main

pytestmark = pytest.mark.unit


def test_help_and_main_import_nothing_heavy():
    code = (
        "import sys, miles_hpc.cli.main as m\n"
        "m._parser().format_help()\n"
        "print([n for n in ('msgspec', 'zmq', 'numpy', 'rich', 'asyncio', 'miles_hpc.config')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_help_of_a_verb_says_what_it_is_for_and_which_recipes_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "run a recipe or your own run files on this machine" in said
    recipes = resources.files("miles_hpc.recipes").iterdir()
    names = sorted(path.name.removesuffix(".toml") for path in recipes if path.name.endswith(".toml"))
    assert f"({', '.join(names)})" in said


def test_no_verb_prints_the_help_and_counts_as_bad_input(capsys):
    assert main([]) == 2
    assert "exit codes: 0 finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["run", "--dry"], "unrecognized arguments"),
        (["config"], "required"),
        (["make-model", "out", "--seed", "x"], "invalid int value"),
        (["events", "-n", "-5"], "argument -n/--lines: -5 is less than 0: see `miles-hpc events --help`"),
        (["logs", "-n", "many"], "invalid count value: 'many'"),
        (["logs", "--attempt", "-1"], "--attempt: -1 is less than 0"),
        (["stop", "cell", "--timeout", "-1"], "--timeout: -1 is no number of seconds above 0"),
        (["restart", "cell", "--timeout", "nan"], "--timeout: nan is no number of seconds above 0"),
        (["status", "-n"], "unrecognized arguments: -n: see `miles-hpc status --help`"),
        (["config", "show", "--fast"], "unrecognized arguments: --fast: see `miles-hpc config show --help`"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line_with_code_2(argv, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and expected in err


def test_config_show_prints_the_whole_config(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("model.path = 'm'\ndata.prompts = 'p.jsonl'\n")
    assert main(["config", "show", str(file), "--set", "steps=3"]) == 0
    out = capsys.readouterr().out
    assert "steps = 3" in out and f'path = "{tmp_path}/m"' in out and "[timing]" in out


def test_config_show_refuses_conflicts_with_the_file_that_set_the_key(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("model.path = 'm'\ndata.prompts = 'p.jsonl'\n[rollout]\nbatch_size = 7\nsamples_per_prompt = 1\n")
    assert main(["config", "show", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"miles-hpc: {file}: rollout.batch_size = 7 x")
    assert main(["config", "show"]) == 2


def test_config_schema_describes_every_setting(capsys):
    assert main(["config", "schema"]) == 0
    text = capsys.readouterr().out
    assert "# Prompt groups in a step. (integer >= 1)\nbatch_size = 8\n" in text and "[runtimes.NAME]" in text
    assert main(["config", "schema", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    rollout = schema["$defs"]["RolloutConfig"]["properties"]
    assert rollout["batch_size"] == {
        "description": "Prompt groups in a step.",
        "minimum": 1,
        "type": "integer",
        "default": 8,
    }
    assert schema["$defs"]["Config"]["additionalProperties"] is False


def test_make_model_writes_a_model_and_refuses_to_overwrite_one(tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["make-model", str(out), "--hidden-size", "16", "--layers", "1", "--heads", "2", "--seed", "5"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 16
    assert main(["make-model", str(out)]) == 2
    assert main(["make-model", str(tmp_path / "b"), "--layers", "0"]) == 2
    assert all(line.startswith("miles-hpc: make-model") for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("verb", ["postmortem", "report"])
def test_a_postmortem_says_how_the_run_ended_and_writes_the_report(verb, tmp_path, capsys):
    assert main([verb, str(tmp_path / "none")]) == 2
    assert f"{verb} {tmp_path}/none: no such directory" in capsys.readouterr().err
    assert main([verb, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no attempt has ended with a verdict") and "report.html" in out
    (tmp_path / "summary.json").write_text(json.dumps({"outcome": "failed", "steps": 3, "reason": "engine\nlost"}))
    assert main([verb, str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "failed after 3 steps: engine lost"


def test_the_configuration_page_agrees_with_the_schema():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text() == markdown(), "run: miles-hpc config schema --markdown > docs/configuration.md"
