import copy
import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from miles_hpc.config.schema import Config, MakeModelConfig, TrainConfig
from miles_hpc.rollout.convert import TrainBatch
from miles_hpc.rollout.split import split_samples
from miles_hpc.train.make_model import make_model
from miles_hpc.train.torch_batch import packed_micro_batches, rollout_micro_batches
from miles_hpc.train.torch_trainer import TorchTrainer
from miles_hpc.train.trainer import CheckpointDamaged, CheckpointRef, TrainerError
from miles_hpc.transport.columns import offsets_of
from miles_hpc.wire.address import HostAndPort
from miles_hpc.wire.ids import Generation
from miles_hpc.wire.worker_env import WorkerEnv

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    make = MakeModelConfig(hidden_size=16, layers=1, heads=2)
    return make_model(make, 0, tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture
def trainer(model_dir, tmp_path):
    address = {"rpc": HostAndPort("127.0.0.1", 1), "master": HostAndPort("127.0.0.1", 2)}
    env = WorkerEnv(
        run_dir=tmp_path,
        attempt=0,
        worker="trainer-00000-00000",
        pool="trainer",
        cell_index=0,
        worker_index=0,
        generation=Generation(1, 1),
        node="node-00000",
        listen=address,
        master=address,
        cell_size=1,
    )

    def make(resume=None, **train):
        sections = {"model": {"path": str(model_dir)}, "train": {"learning_rate": 1e-2, **train}}
        made = TorchTrainer(msgspec.convert(sections, Config), env, 0, 1)
        made.init(resume)
        return made

    return make


def rollout(samples=8, seed=0, policy=None):
    """Samples of different lengths; sampled by `policy` as far as their log-probs tell."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    mask = np.ones(total, np.uint8)
    mask[offsets[:-1]] = 0
    mask[offsets[:-1] + 1] = 0
    batch = TrainBatch(
        rollout_id=1,
        weight_version=1,
        total_samples=samples,
        total_response_tokens=int(mask.sum()),
        token_ids=rng.integers(0, 300, total).astype(np.int32),
        offsets=offsets,
        response_mask=mask,
        logprobs=np.zeros(total, np.float32),
        advantages=rng.normal(size=samples).astype(np.float32),
        rewards=np.zeros(samples, np.float32),
        group_index=np.zeros(samples, np.int64),
        sample_index=np.arange(samples, dtype=np.int64),
        prompt_index=np.zeros(samples, np.int64),
        status=np.zeros(samples, np.uint8),
        oldest_version=np.ones(samples, np.int64),
        micro_batches=np.array([0, samples], np.int64),
    )
    return batch if policy is None else with_logprobs(batch, policy)


def with_logprobs(batch, model):
    """The batch with the log-probs that a careful engine reports: one sample at a time, nothing padded."""
    found = np.zeros(len(batch.token_ids), np.float32)
    with torch.no_grad():
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.token_ids[start:stop].astype(np.int64))
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
            found[start + 1 : stop] = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()
    found[batch.response_mask == 0] = 0
    return dataclasses.replace(batch, logprobs=found)


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_log_probs_equal_an_engines_in_fp32(trainer):
    made = trainer()
    assert made.train(rollout(policy=made.model))["logprob_gap"] < 1e-5


def test_a_step_raises_what_had_an_advantage(trainer):
    made = trainer(learning_rate=1e-3)
    before = rollout(policy=made.model)
    made.train(before)
    moved = with_logprobs(before, made.model).logprobs - before.logprobs
    per_token = np.repeat(before.advantages, np.diff(before.offsets))
    assert float((moved * per_token).sum()) > 0


def test_micro_batches_change_nothing_but_rounding(trainer):
    whole, parts = trainer(micro_batch_size=8), trainer(micro_batch_size=3)
    batch = rollout(policy=whole.model)
    one, other = whole.train(batch), parts.train(batch)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_every_sample_is_in_one_micro_batch_without_its_padding():
    batch = rollout()
    found = list(rollout_micro_batches(batch, np.arange(len(batch)), 3))
    assert [len(micro.token_ids) for micro in found] == [3, 3, 2]
    assert sum(int(micro.mask.sum()) for micro in found) == batch.total_response_tokens
    tokens = torch.cat([micro.targets[micro.mask] for micro in found]).tolist()
    assert sorted(tokens) == sorted(batch.token_ids[batch.response_mask == 1].tolist())


def packed(batch, budget, **train):
    """The batch as the executor packs it for one rank."""
    lengths = np.diff(batch.offsets)
    share = split_samples(lengths, 1, TrainConfig(max_tokens_per_micro_batch=budget, **train))[0][0]
    spans = [slice(int(batch.offsets[row]), int(batch.offsets[row + 1])) for row in share.rows]
    tokens = {
        name: np.concatenate([getattr(batch, name)[span] for span in spans])
        for name in ("token_ids", "response_mask", "logprobs")
    }
    return dataclasses.replace(
        batch,
        offsets=offsets_of(lengths[share.rows]),
        advantages=batch.advantages[share.rows],
        micro_batches=share.micro_batches,
        **tokens,
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_packed_micro_batches_change_nothing_but_rounding(trainer, updates):
    plain = trainer(updates_per_step=updates)
    batch = rollout(policy=plain.model)
    small = trainer(max_tokens_per_micro_batch=17, updates_per_step=updates)
    one, other = plain.train(batch), small.train(packed(batch, 17, updates_per_step=updates))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert other["logprob_gap"] == pytest.approx(one["logprob_gap"], abs=1e-4)


def test_packed_micro_batches_keep_to_the_budget_and_predict_no_first_token():
    batch = packed(rollout(), 17)
    found = list(packed_micro_batches(batch, 0, 1))
    assert len(found) > 1 and all(micro.token_ids.shape[1] <= 17 for micro in found)
    assert sum(int(micro.mask.sum()) for micro in found) == batch.total_response_tokens
    batch.response_mask[:] = 1
    first = next(packed_micro_batches(batch, 0, 1))
    assert first.mask[0].tolist() == (first.positions[0, 1:] > 0).tolist()


def test_a_model_that_mixes_packed_samples_is_refused(trainer, monkeypatch):
    def blind(position_ids):
        return None

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", blind)
    with pytest.raises(TrainerError, match=r"does not keep packed samples apart .*max_tokens_per_micro_batch = 0"):
        trainer(max_tokens_per_micro_batch=17)


def test_updates_per_step_go_through_the_batch_in_parts(trainer):
    made = trainer(updates_per_step=2)
    made.train(rollout(policy=made.model))
    steps = {int(state["step"]) for state in made._optimizer.state.values()}
    assert steps == {2}


def test_learning_rate_0_changes_no_weight(trainer):
    made = trainer(learning_rate=0.0)
    before = weights(made).clone()
    made.train(rollout(policy=made.model))
    assert torch.equal(weights(made), before)


def test_gradients_are_clipped_to_their_bound(trainer):
    made = trainer(max_grad_norm=1e-3)
    assert made.train(rollout(policy=made.model))["grad_norm"] > 1e-3
    assert float(torch.linalg.vector_norm(made._gradients._buffer)) == pytest.approx(1e-3, rel=1e-4)


def test_a_gradient_that_is_not_finite_ends_the_step(trainer):
    made = trainer()
    batch = rollout()
    batch.logprobs[:] = -np.inf
    before = weights(made).clone()
    with pytest.raises(TrainerError, match="not finite"):
        made.train(batch)
    assert torch.equal(weights(made), before)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_resumed_trainer_goes_on_bit_by_bit(trainer, tmp_path, kl_coef):
    first = trainer(kl_coef=kl_coef)
    first.train(rollout(seed=1, policy=first.model))
    path = tmp_path / "checkpoint"
    path.mkdir()
    ref = CheckpointRef(path=str(path), step=1, files=first.save(path))
    again = trainer(resume=ref, kl_coef=kl_coef)
    assert torch.equal(weights(again), weights(first))
    batch = rollout(seed=2, policy=first.model)
    assert again.train(batch) == first.train(batch)
    assert torch.equal(weights(again), weights(first))


def test_the_penalty_pulls_towards_the_start_policy(trainer):
    free, held = trainer(), trainer(kl_coef=10.0)
    start = copy.deepcopy(free.model)
    batch = rollout(policy=start)
    for _ in range(8):
        free.train(with_logprobs(batch, free.model))
        held.train(with_logprobs(batch, held.model))

    def distance(model):
        return float(np.abs(with_logprobs(batch, model).logprobs - batch.logprobs).sum())

    assert held.train(with_logprobs(batch, held.model))["kl"] > 0
    assert distance(held.model) < 0.7 * distance(free.model)


def test_a_changed_checkpoint_is_refused(trainer, tmp_path):
    made = trainer()
    files = made.save(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"x" * (tmp_path / "optimizer.pt").stat().st_size)
    with pytest.raises(CheckpointDamaged, match=r"optimizer\.pt"):
        trainer(resume=CheckpointRef(path=str(tmp_path), step=1, files=files))


def test_a_checkpoint_and_an_export_are_model_directories(trainer, model_dir, tmp_path):
    made = trainer()
    made.train(rollout(policy=made.model))
    made.export_weights(tmp_path / "export")
    (tmp_path / "checkpoint").mkdir()
    made.save(tmp_path / "checkpoint")
    for path in (tmp_path / "export", tmp_path / "checkpoint"):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (path / name).read_bytes() == (model_dir / name).read_bytes()
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        flat = torch.cat([parameter.detach().flatten() for parameter in loaded.parameters()])
        assert torch.equal(flat, weights(made))


def test_the_warm_start_learns_its_answers(trainer, tmp_path):
    data = tmp_path / "warm.jsonl"
    data.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    warm = {"data": str(data), "steps": 120, "batch_size": 2, "learning_rate": 1e-2}
    made = trainer(warm_start=warm)
    assert made.warm_start()["loss"] < 0.1
