"""`miles-hpc rollouts show FILE`: prompt, response with log-probs and mask, reward, versions, for people."""

import io

import pytest
from rich.console import Console

from miles_hpc.cli import rollouts
from miles_hpc.cli.main import main
from miles_hpc.config.load import write_resolved
from miles_hpc.config.schema import Config, MakeModelConfig, ModelConfig
from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.rollout.data import DataState
from miles_hpc.rollout.debug import load_rollout, save_rollout
from miles_hpc.rollout.groups import groups_of
from miles_hpc.rollout.producer import Produced
from miles_hpc.rollout.sample import GroupSpec
from miles_hpc.transport.batch import RolloutBatch, SampleArrays

pytestmark = pytest.mark.unit


def saved(directory, ids=((1, 2, 3, 4), (1, 2, 5)), texts=("yes", "no")):
    rows = [
        SampleArrays(
            list(tokens),
            [0, 0] + [1] * (len(tokens) - 2),
            [0.0, 0.0] + [-0.05 if index else -4.0] * (len(tokens) - 2),
            float(index),
            versions=[(7, 2, len(tokens))],
            status="truncated" if index else "completed",
            sample_index=index,
            prompt_index=9,
            texts={"response": text},
        )
        for index, (tokens, text) in enumerate(zip(ids, texts, strict=True))
    ]
    groups = groups_of(RolloutBatch.pack(rows * 2), [2, 2])
    groups[0].stats = {"category/right": 1.0}
    specs = [GroupSpec(id=f"e00000-i00000000{i}", epoch=0, index=i, prompt_index=9) for i in (3, 4)]
    produced = Produced(specs=specs, groups=groups, place=DataState(), metrics={})
    return save_rollout(directory / "rollouts", 12, 7, produced)


def shown(capsys, *words):
    code = main(["rollouts", "show", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_samples_are_told_with_reward_status_versions_mask_and_log_probs(tmp_path, capsys):
    code, text = shown(capsys, saved(tmp_path), "--plain")
    assert code == 0
    assert "rollout 12: 2 groups, 4 samples, 6 generated of 14 tokens, reward 0.5, asked for at weights 7" in text
    assert "e00000-i000000003 sample 1  prompt 9  reward 1  truncated  versions 7 (2:3)" in text
    assert "|1 2 |3 4 " in text and "log-probs -4.00 -4.00" in text  # without a run directory: token ids


def test_one_group_or_a_few_samples_may_be_asked_for(tmp_path, capsys):
    path = saved(tmp_path)
    code, text = shown(capsys, path, "--plain", "--limit", "1")
    assert code == 0 and text.count("reward") == 2 and "3 more samples; --limit 0 shows all" in text
    code, text = shown(capsys, path, "--plain", "--group", "e00000-i000000004", "--limit", "0")
    assert code == 0 and "e00000-i000000003" not in text and text.count("sample ") == 2
    code, text = shown(capsys, path, "--group", "nobody")
    assert code == 2 and "no group 'nobody'; it holds e00000-i000000003" in text


def test_a_file_in_a_run_directory_is_shown_as_text_with_colours_for_unlikely_tokens(tmp_path, capsys):
    from miles_hpc.train.make_model import make_model

    model = make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 1, tmp_path / "model")
    tokenizer = ChatTokenizer(model)
    ids = tokenizer.encode("12")
    assert len(ids) == 2
    path = saved(tmp_path, ids=([*ids, *ids], [*ids, ids[0]]), texts=("12", "1"))
    write_resolved(Config(model=ModelConfig(path=str(model))), tmp_path)
    code, text = shown(capsys, path, "--plain")
    assert code == 0 and "|12|12" in text
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(rollouts._coloured(["a", "b", "c"], [0, 1, 1], [0.0, -0.05, -4.0]))
    text = console.file.getvalue()
    assert "\x1b[2ma" in text and "\x1b[32mb" in text and "\x1b[31mc" in text  # dim, likely, unlikely


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "x.parcel").write_bytes(b"nothing of the kind")
    code, text = shown(capsys, tmp_path / "x.parcel")
    assert code == 2 and "not a saved rollout" in text
    code, text = shown(capsys, tmp_path / "y.parcel")
    assert code == 2 and "no such file" in text


def test_what_was_counted_comes_back_with_the_tokens(tmp_path):
    produced, version = load_rollout(saved(tmp_path).parent, 12)
    assert version == 7 and [dict(group.stats) for group in produced.groups] == [{"category/right": 1.0}, {}]
