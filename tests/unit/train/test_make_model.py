import json

import pytest

from miles_hpc.config.schema import MakeModelConfig
from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.train.make_model import make_model

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(MakeModelConfig(), 0, tmp_path_factory.mktemp("models") / "tiny")


def test_equal_seeds_give_equal_bytes_and_others_do_not(model_dir, tmp_path):
    same, other = (make_model(MakeModelConfig(), seed, tmp_path / str(seed)) for seed in (0, 1))
    for path in model_dir.iterdir():
        assert path.read_bytes() == (same / path.name).read_bytes()
    assert (model_dir / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_each_digit_is_a_token(model_dir):
    tokenizer = ChatTokenizer(model_dir)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("4711")] == ["4", "7", "1", "1"]


def test_any_text_survives_the_tokenizer(model_dir):
    tokenizer = ChatTokenizer(model_dir)
    text = "Größe: 12 ≤ 34\n\tend"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_id_of_the_model_has_a_token(model_dir):
    tokenizer = ChatTokenizer(model_dir)
    assert tokenizer.vocab_size == json.loads((model_dir / "config.json").read_text())["vocab_size"]
    assert all(tokenizer.token_text(token) for token in range(tokenizer.vocab_size))


def test_the_chat_template_only_appends(model_dir):
    tokenizer = ChatTokenizer(model_dir)
    messages = [{"role": "user", "content": "Write 12 backwards."}]
    prompt = tokenizer.render(messages)
    answered = [*messages, {"role": "assistant", "content": "21"}]
    whole = tokenizer.render(answered, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    assert whole[-1] in tokenizer.stop_token_ids
    longer = tokenizer.render([*answered, {"role": "user", "content": "Again."}])
    assert longer[: len(whole)] == whole


def test_a_width_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"hidden_size 20 must be a multiple of 2 x model\.make\.heads \(4\)"):
        make_model(MakeModelConfig(hidden_size=20, heads=4), 0, tmp_path / "m")


def test_a_model_is_never_overwritten(model_dir):
    with pytest.raises(FileExistsError, match="already holds a model"):
        make_model(MakeModelConfig(), 0, model_dir)
