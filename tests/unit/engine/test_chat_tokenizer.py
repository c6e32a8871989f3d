"""Chat templates and special tokens as HF model directories hold them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from miles_hpc.engine.chat_tokenizer import ChatTemplateError, ChatTokenizer, ModelDirError

pytestmark = pytest.mark.unit

MESSAGES = [{"role": "user", "content": "12 + 34?"}]


def copy_of(model_dir: Path, path: Path) -> Path:
    shutil.copytree(model_dir, path)
    return path


def edit(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            data.pop(key, None)
        else:
            data[key] = value
    path.write_text(json.dumps(data))


def test_a_conversation_becomes_ids_with_special_tokens_and_back(model_dir: Path) -> None:
    tokenizer = ChatTokenizer(model_dir)
    ids = tokenizer.render(MESSAGES)
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_text(MESSAGES)
    assert tokenizer.render_text(MESSAGES).endswith("<|im_start|>assistant\n")
    assert not tokenizer.render_text(MESSAGES, add_generation_prompt=False).endswith("assistant\n")


def test_special_tokens_are_left_out_of_decoded_text(model_dir: Path) -> None:
    tokenizer = ChatTokenizer(model_dir)
    assert tokenizer.decode([*tokenizer.encode("46"), tokenizer.stop_token_ids[0]]) == "46"


def test_the_vocabulary_is_the_models_and_not_the_tokenizers(model_dir: Path, tmp_path: Path) -> None:
    assert ChatTokenizer(model_dir).vocab_size == 320
    bare = copy_of(model_dir, tmp_path / "m")
    (bare / "config.json").unlink()
    known = json.loads((bare / "tokenizer.json").read_text())["model"]["vocab"]
    assert ChatTokenizer(bare).vocab_size == len(known)


def test_stop_ids_come_from_eos_token_generation_config_and_config(model_dir: Path, tmp_path: Path) -> None:
    path = copy_of(model_dir, tmp_path / "m")
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    edit(path / "config.json", eos_token_id=9)
    assert ChatTokenizer(path).stop_token_ids == [2, 7, 9]


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "named list"])
def test_a_chat_template_is_found_wherever_models_keep_it(model_dir: Path, tmp_path: Path, place: str) -> None:
    path = copy_of(model_dir, tmp_path / "m")
    edit(path / "tokenizer_config.json", chat_template=None)
    text = "{{ messages[0]['content'] | tojson }}{{ eos_token }}"
    if place == "chat_template.jinja":
        (path / place).write_text(text)
    elif place == "chat_template.json":
        (path / place).write_text(json.dumps({"chat_template": text}))
    else:
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": text}]
        edit(path / "tokenizer_config.json", chat_template=named)
    assert ChatTokenizer(path).render_text([{"role": "user", "content": "ü<"}]) == '"ü<"<|im_end|>'


def test_an_override_file_replaces_the_models_template(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}A{% endfor %}B")
    assert ChatTokenizer(model_dir, str(template)).render_text(MESSAGES) == "B"


def test_generation_marks_are_passed_through(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("a{% generation %}b{% endgeneration %}c")
    assert ChatTokenizer(model_dir, str(template)).render_text(MESSAGES) == "abc"


def test_a_template_that_refuses_messages_says_so(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ChatTemplateError, match="no system role"):
        ChatTokenizer(model_dir, str(template)).render(MESSAGES)


def test_a_template_cannot_reach_out_of_its_sandbox(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError):
        ChatTokenizer(model_dir, str(template)).render(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", None, "tokenizer.json: missing; save"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", None, "no chat template in"),
        ("tokenizer_config.json", "{", "not readable as JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "does not compile"),
    ],
)
def test_a_broken_model_directory_is_one_line(
    model_dir: Path, tmp_path: Path, name: str, content: str | None, expected: str
) -> None:
    path = copy_of(model_dir, tmp_path / "m")
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_text(content)
    with pytest.raises(ModelDirError) as caught:
        ChatTokenizer(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_model_directory_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ModelDirError, match=r"model\.path"):
        ChatTokenizer(tmp_path / "none")
