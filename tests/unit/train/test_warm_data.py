import json

import numpy as np
import pytest

from miles_hpc.config.schema import MakeModelConfig, WarmStartConfig
from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.train.make_model import make_model
from miles_hpc.train.warm_data import WarmStartDataError, batches, read_examples

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    make = MakeModelConfig(hidden_size=16, layers=1, heads=2)
    return ChatTokenizer(make_model(make, 0, tmp_path_factory.mktemp("m") / "tiny"))


def warm(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return WarmStartConfig(data=str(path))


def test_the_mask_begins_with_the_answer_and_ends_with_its_end(tokenizer, tmp_path):
    [example] = read_examples(warm(tmp_path / "w", {"prompt": "Write 12 backwards.", "answer": "21"}), tokenizer)
    answer = example.token_ids[example.answer_start :].tolist()
    assert tokenizer.decode(answer) == "21"
    assert answer[-1] in tokenizer.stop_token_ids


def test_of_a_conversation_only_the_last_answer_counts(tokenizer, tmp_path):
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    [example] = read_examples(warm(tmp_path / "w", {"prompt": talk, "answer": 7}), tokenizer)
    assert tokenizer.decode(example.token_ids[: example.answer_start]) == "abc"
    assert tokenizer.decode(example.token_ids[example.answer_start :]) == "7"


@pytest.mark.parametrize("line", ["{broken", '{"prompt": "p"}', "[1]", "7"])
def test_a_broken_line_is_named_by_its_number(tokenizer, tmp_path, line):
    file = warm(tmp_path / "w.jsonl", {"prompt": "p", "answer": "a"}, line)
    with pytest.raises(WarmStartDataError, match=r"w\.jsonl:2: "):
        read_examples(file, tokenizer)


def test_a_missing_or_empty_file_is_named(tokenizer, tmp_path):
    with pytest.raises(WarmStartDataError, match=r"nothing\.jsonl: not readable"):
        read_examples(WarmStartConfig(data=str(tmp_path / "nothing.jsonl")), tokenizer)
    with pytest.raises(WarmStartDataError, match="holds no example"):
        read_examples(warm(tmp_path / "empty.jsonl"), tokenizer)


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages | length }}{{ messages[-1].content }}")
    rewriting = ChatTokenizer(tokenizer.model_dir, str(tmp_path / "t.jinja"))
    with pytest.raises(WarmStartDataError, match="changes the prompt once it is answered"):
        read_examples(warm(tmp_path / "w", {"prompt": "p", "answer": "a"}), rewriting)


def test_every_example_comes_once_an_epoch_and_batches_cross_the_seam():
    rows = np.concatenate(list(batches(5, 4, 5, seed=1)))
    assert [len(set(rows[start : start + 5])) for start in (0, 5, 10, 15)] == [5] * 4
    assert rows.tolist() == np.concatenate(list(batches(5, 4, 5, seed=1))).tolist()
    assert rows.tolist() != np.concatenate(list(batches(5, 4, 5, seed=2))).tolist()


def test_a_batch_may_be_larger_than_the_data():
    assert [len(rows) for rows in batches(3, 8, 2, seed=0)] == [8, 8]
