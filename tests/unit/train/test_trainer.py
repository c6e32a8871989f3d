import json

import msgspec
import numpy as np
import pytest

from miles_hpc.config.schema import Config, MakeModelConfig
from miles_hpc.rollout.convert import TrainBatch
from miles_hpc.train.hash_trainer import HashTrainer
from miles_hpc.train.make_model import make_model
from miles_hpc.train.trainer import CheckpointDamaged, CheckpointRef, Trainer, TrainerError, make_trainer

pytestmark = pytest.mark.unit


def batch(tokens):
    count = len(tokens)
    zeros = np.zeros(count, np.float32)
    return TrainBatch(
        rollout_id=1,
        weight_version=1,
        total_samples=1,
        total_response_tokens=count,
        token_ids=np.array(tokens, np.int32),
        offsets=np.array([0, count], np.int64),
        response_mask=np.ones(count, np.uint8),
        logprobs=zeros,
        advantages=zeros[:1],
        rewards=zeros[:1],
        group_index=np.zeros(1, np.int64),
        sample_index=np.zeros(1, np.int64),
        prompt_index=np.zeros(1, np.int64),
        status=np.zeros(1, np.uint8),
        oldest_version=np.ones(1, np.int64),
        micro_batches=np.array([0, 1], np.int64),
    )


@pytest.fixture
def hash_trainer(tmp_path):
    model = tmp_path / "model"
    if not model.exists():
        make_model(MakeModelConfig(hidden_size=16, layers=1, heads=2), 0, model)
    config = msgspec.convert({"model": {"path": str(model)}, "train": {"trainer": "hash"}}, Config)

    def make(rank=0, resume=None):
        trainer = make_trainer(config, None, rank, 2)
        trainer.init(resume)
        return trainer

    return make


def saved(trainer, path):
    path.mkdir()
    return CheckpointRef(path=str(path), step=1, files=trainer.save(path))


def test_the_hash_tells_batches_and_their_order_apart(hash_trainer):
    def state(*batches):
        trainer = hash_trainer()
        for one in batches:
            trainer.train(one)
        return trainer.state

    a, b = batch([1, 2]), batch([1, 3])
    assert state(a, b) == state(a, b)
    assert len({state(a, b).digest, state(b, a).digest, state(a, a).digest, state(a).digest}) == 4


def test_a_checkpoint_brings_the_hash_back(hash_trainer, tmp_path):
    first = hash_trainer()
    first.train(batch([1]))
    again = hash_trainer(resume=saved(first, tmp_path / "c"))
    first.train(batch([2]))
    again.train(batch([2]))
    assert again.state == first.state and again.state.batches == 2


def test_rank_0_alone_exports_and_the_directory_has_what_engines_read(hash_trainer, tmp_path):
    hash_trainer(rank=1).export_weights(tmp_path / "w")
    assert not (tmp_path / "w").exists()
    hash_trainer().export_weights(tmp_path / "w")
    names = {path.name for path in (tmp_path / "w").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "weights.json"} <= names
    assert json.loads((tmp_path / "w" / "weights.json").read_text())["batches"] == 0


@pytest.mark.parametrize("harm", ["changed", "missing", "another rank's"])
def test_a_damaged_checkpoint_is_named_with_its_file(hash_trainer, tmp_path, harm):
    ref = saved(hash_trainer(), tmp_path / "c")
    state = tmp_path / "c" / "state-00000.json"
    if harm == "changed":
        state.write_bytes(state.read_bytes()[::-1])
    elif harm == "missing":
        state.unlink()
    with pytest.raises(CheckpointDamaged, match=r"state-0000\d\.json"):
        hash_trainer(rank=1 if harm == "another rank's" else 0, resume=ref)


class MyTrainer(HashTrainer):
    pass


def with_trainer(name):
    return msgspec.convert({"train": {"trainer": name}}, Config)


def test_a_trainer_of_the_users_own_is_found_by_its_path(monkeypatch):
    import sys
    import types

    module = types.ModuleType("own_trainers")
    module.MyTrainer = MyTrainer
    monkeypatch.setitem(sys.modules, "own_trainers", module)
    assert isinstance(make_trainer(with_trainer("own_trainers:MyTrainer"), None, 0, 1), MyTrainer)


@pytest.mark.parametrize("name", ["no.such.module:X", "miles_hpc.train.trainer:Nothing"])
def test_a_trainer_that_does_not_import_is_named(name):
    with pytest.raises(TrainerError, match="does not import"):
        make_trainer(with_trainer(name), None, 0, 1)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(TrainerError, match="no subclass"):
        make_trainer(with_trainer("miles_hpc.train.trainer:CheckpointRef"), None, 0, 1)
    assert issubclass(HashTrainer, Trainer)
