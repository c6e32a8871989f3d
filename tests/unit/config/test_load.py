from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.config import load as loading
from miles_hpc.config import tree
from miles_hpc.config.errors import ConfigError
from miles_hpc.config.load import absolute, load, load_with_origins, read_resolved, to_toml, write_resolved
from miles_hpc.config.schema import Config

pytestmark = pytest.mark.unit


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(files, sets=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(files, sets)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_later_files_win_and_tables_are_merged(tmp_path):
    one = write(
        tmp_path / "one.toml", "steps = 5\n[rollout]\nbatch_size = 4\nworkers = 3\n[runtimes.engine.env]\nA = '1'\n"
    )
    two = write(
        tmp_path / "two.toml", "[rollout]\nbatch_size = 16\n[runtimes.engine.env]\nB = '2'\n[runtimes.router]\n"
    )
    config = load([one, two], ["rollout.temperature=0.5"])
    assert (config.steps, config.rollout.batch_size, config.rollout.workers) == (5, 16, 3)
    assert config.rollout.temperature == 0.5
    assert config.runtimes["engine"].env == {"A": "1", "B": "2"}
    assert set(config.runtimes) == {"engine", "router"}


def test_paths_are_seen_from_the_file_that_sets_them_and_from_here_in_a_set(tmp_path, monkeypatch):
    one = write(
        tmp_path / "a" / "one.toml", "model.path = 'm'\ndata.prompts = '../p.jsonl@[2:-1]'\ndata.heldout = ''\n"
    )
    two = write(tmp_path / "b" / "two.toml", "[train.warm_start]\ndata = 'w.jsonl'\n")
    monkeypatch.chdir(tmp_path)
    config = load([one, two], ["model.chat_template=t.jinja", "runtimes.router.python=bin/python"])
    assert config.model.path == str(tmp_path / "a" / "m")
    assert config.data.prompts == f"{tmp_path}/p.jsonl@[2:-1]"
    assert config.data.heldout == ""
    assert config.train.warm_start is not None and config.train.warm_start.data == str(tmp_path / "b" / "w.jsonl")
    assert config.model.chat_template == str(tmp_path / "t.jinja")
    assert config.runtimes["router"].python == str(tmp_path / "bin" / "python")


def test_an_interpreter_without_a_slash_stays_a_name_for_path():
    assert load([], ["runtimes.router.python=python3.11"]).runtimes["router"].python == "python3.11"


def test_the_home_directory_is_expanded():
    assert absolute("~/model", Path("/x")) == str(Path.home() / "model")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("steps=7", 7),
        ("name=hello world", "hello world"),
        ("name='quoted'", "quoted"),
        ("name=7", "7"),
        ("name=a=b", "a=b"),
        ("name=", ""),
        ("seed=-3", -3),
        ("network.port_range=[20000, 21000]", (20000, 21000)),
        ("data.shuffle=false", False),
        ('rollout.stop=["a", "b"]', ["a", "b"]),
        ("inference.sglang.mem_fraction_static=0.8", {"mem_fraction_static": 0.8}),
        ("reward.function=module_of_mine:score", "module_of_mine:score"),
    ],
)
def test_a_set_takes_toml_values_and_bare_texts(text, value):
    found = load([], [text])
    for part in text.partition("=")[0].split("."):
        if isinstance(found, dict):
            break
        found = getattr(found, part)
    assert found == value


def test_none_unsets_an_optional_table(tmp_path):
    file = write(tmp_path / "run.toml", "[model.make]\nhidden_size = 32\n")
    assert load([file]).model.make is not None
    assert load([file], ["model.make=none"]).model.make is None
    assert load([file], ["model.make=none", "model.make.layers=3"]).model.make.layers == 3


def test_an_unknown_key_is_refused_with_file_key_and_the_nearest_name(tmp_path):
    file = write(tmp_path / "run.toml", "[rollout]\nbatchsize = 4\n")
    assert refusal([file]) == f"{file}: unknown key 'rollout.batchsize': did you mean 'rollout.batch_size'?"
    assert "did you mean 'rollout.batch_size'?" in refusal([], ["train.batch_size=4"])
    assert "did you mean 'rollout'?" in refusal([], ["rolout.batch_size=4"])
    assert "the top level takes name, seed" in refusal([], ["zzzzz=1"])
    assert "did you mean 'runtimes.router.python'?" in refusal([], ["runtimes.router.pyhton=x"])


def test_a_wrong_type_is_refused_with_file_key_and_what_was_expected(tmp_path):
    file = write(tmp_path / "run.toml", "[rollout]\nbatch_size = 'many'\n")
    assert refusal([file]) == f"{file}: rollout.batch_size: expected integer >= 1, found the text 'many'"
    assert refusal([], ["rollout=4"]).startswith("--set: rollout: expected a table (batch_size,")
    assert refusal([], ["data.shuffle=7"]) == "--set: data.shuffle: expected true or false, found the integer 7"
    assert 'one of "abort", "in_place", "retract"' in refusal([], ["inference.pause_mode=stop"])
    assert "expected integer, found true" in refusal([], ["seed=true"])


def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path):
    file = write(tmp_path / "run.toml", "steps = \n")
    text = refusal([file])
    assert text.startswith(f"{file}: not valid TOML:") and "line 1" in text


def test_a_name_that_is_neither_file_nor_recipe_is_refused_with_the_recipes(tmp_path, monkeypatch):
    write(tmp_path / "quickstart.toml", "steps = 3\n")
    monkeypatch.setattr(loading, "recipes_dir", lambda: tmp_path)
    assert refusal(["quikstart"]).endswith("did you mean the recipe 'quickstart'?")
    assert refusal(["zzz"]).endswith("recipes are: quickstart")
    assert load(["quickstart"]).steps == 3
    assert "is a directory" in refusal([tmp_path])


def test_a_set_without_a_value_is_refused():
    assert refusal([], ["steps"]).startswith("--set steps: expected KEY=VALUE")
    assert refusal([], [".=3"]).startswith("--set .=3: expected KEY=VALUE")


def test_timing_in_the_wrong_order_is_refused_with_both_names(tmp_path):
    file = write(tmp_path / "run.toml", "[timing]\nsuspect = 30\n")
    text = refusal([file])
    assert text.startswith(f"{file}: ") and "timing.suspect" in text and "timing.dead" in text


def test_the_origin_of_each_key_is_kept(tmp_path):
    one = write(tmp_path / "one.toml", "steps = 1\n[rollout]\nbatch_size = 4\n")
    loaded = load_with_origins([one], ["rollout.batch_size=8"])
    assert loaded.origin(["rollout.batch_size"]) == "--set"
    assert loaded.origin(["steps"]) == str(one)
    assert loaded.origin(["train.ranks"]) == str(one)
    assert loaded.origin(["steps", "rollout.batch_size", "train.ranks"]) == f"{one} and --set"


def test_own_code_beside_the_run_file_is_found_only_where_a_dotted_path_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "a" / "run.toml", "reward.function = 'mine:score'\npython_path = ['lib']\n")
    assert load([file]).python_path == [str(tmp_path / "a" / "lib"), str(tmp_path / "a"), str(tmp_path)]
    assert load([file], ["reward.function=exact_match"]).python_path == [str(tmp_path / "a" / "lib")]


@pytest.mark.parametrize(
    "setting",
    ["reward.function = 'mine:f'", "rollout.generate = 'mine:f'", "rollout.tools = 'mine:f'", "data.source = 'mine:f'",
     "rollout.filters = ['no_aborted', 'mine:f']", "train.trainer = 'mine:T'",
     "eval.datasets.hard = {data = 'h.jsonl', generate = 'mine:f'}"],
)  # fmt: skip
def test_every_setting_that_takes_a_dotted_path_finds_code_beside_the_run_file(tmp_path, setting):
    assert str(tmp_path) in load([write(tmp_path / "run.toml", setting + "\n")]).python_path
    assert load([write(tmp_path / "run.toml", "rollout.filters = ['no_aborted']\n")]).python_path == []


@pytest.mark.parametrize("text", ["04:00:00", "12:30:00", "2026-12-01", "2026-12-01T03:04:05"])
def test_a_set_value_that_toml_reads_as_a_time_is_a_text(text):
    assert load([], [f"slurm.time={text}"]).slurm.time == text


def test_a_resolved_config_reads_back_as_it_was(tmp_path):
    config = load(
        [], ["model.make.layers=3", "network.port_range=[20000,21000]", "runtimes.engine.env.A=1", "name='ü'"]
    )
    write_resolved(config, tmp_path)
    assert read_resolved(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.resolved.toml"]


def test_engine_groups_that_leave_keys_unset_read_back(tmp_path):
    groups = "[{engines=2}, {gpus_per_engine=4, sglang={dtype='bfloat16'}}]"
    config = load([], [f"inference.groups={groups}", "models.judge.path='/j'", f"models.judge.groups={groups}"])
    write_resolved(config, tmp_path)
    assert read_resolved(tmp_path) == config


def test_a_directory_without_a_resolved_config_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_resolved(tmp_path)
    write(tmp_path / "config.resolved.toml", "stepz = 3\n")
    with pytest.raises(ConfigError, match="stepz"):
        read_resolved(tmp_path)


@given(st.text(), st.text(min_size=1), st.floats(0, 2), st.lists(st.text(), max_size=3))
def test_any_text_survives_the_resolved_file(tmp_path_factory, name, key, temperature, stop):
    directory = tmp_path_factory.mktemp("run")
    config = Config(name=name)
    config = loading.msgspec.structs.replace(
        config,
        data=loading.msgspec.structs.replace(config.data, prompt_key=key),
        rollout=loading.msgspec.structs.replace(config.rollout, temperature=temperature, stop=stop),
    )
    write_resolved(config, directory)
    assert read_resolved(directory) == config


def test_every_setting_has_a_description_and_its_default_is_accepted():
    for dotted, node in tree.leaves():
        assert node.description.endswith((".", "...")), dotted
    assert loading.tomllib.loads(to_toml(Config()))


def test_models_have_names_once_and_their_paths_are_seen_from_the_file(tmp_path):
    twice = write(tmp_path / "twice.toml", "[models.judge]\nengines = 1\n[models.judge]\nengines = 2\n")
    assert "judge" in (text := refusal([twice])) and "not valid TOML" in text and "line 3" in text
    file = write(
        tmp_path / "run.toml",
        '[models.judge]\npath = "j"\n[models.judge.external.a]\nurl = "http://h:1"\nkey_file = "k"\n',
    )
    judge = load([file]).models["judge"]
    assert (judge.path, judge.external["a"].key_file) == (str(tmp_path / "j"), str(tmp_path / "k"))


@pytest.mark.parametrize(("sets", "others_read"), [(["runtimes.trainer.env.TOKEN=s3cret"], False), ([], True)])
def test_a_config_with_an_environment_that_may_hold_keys_is_for_its_user_alone(tmp_path, sets, others_read):
    before = os.umask(0o022)
    try:
        path = write_resolved(load(["smoke"], sets), tmp_path)
    finally:
        os.umask(before)
    assert bool(path.stat().st_mode & 0o044) is others_read
    assert list(tmp_path.iterdir()) == [path]
    assert read_resolved(tmp_path) == load(["smoke"], sets)
