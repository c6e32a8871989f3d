"""The reference trainer: torch, data parallel, any causal LM that transformers loads."""

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from miles_hpc.engine.chat_tokenizer import ChatTokenizer
from miles_hpc.rollout.commits import ManifestFile
from miles_hpc.train.grpo import policy_loss, token_logprobs
from miles_hpc.train.hf_files import copy_model_files
from miles_hpc.train.torch_batch import MicroBatch, example_batch, packed_micro_batches, rollout_micro_batches
from miles_hpc.train.torch_group import Gradients, Group
from miles_hpc.train.trainer import CheckpointRef, Trainer, TrainerError, manifest_of, sync_tree
from miles_hpc.train.warm_data import batches, read_examples

if TYPE_CHECKING:
    from miles_hpc.rollout.convert import TrainBatch

log = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.pt"
_START_POLICY = "start-policy.safetensors"
_NOT_MODEL = ("random-", "optimizer", "start-policy")
"""Beginnings of the other files in a checkpoint, some of them other ranks'."""
_RAMP = 0.1
"""Share of the warm start in which its learning rate rises; after that it falls to 0 in a straight line."""
_PROGRESS_S = 10.0


class TorchTrainer(Trainer):
    """GRPO with clipping on replicas that sum their gradients; weights and optimizer in fp32 on the CPU.

    The loss of an update is the mean over the response tokens of all ranks. Replicas stay equal bit by bit: they start
    equal and add the same sums.
    """

    _group: Group | None = None

    def init(self, resume: CheckpointRef | None) -> None:
        torch.set_num_threads(self.config.train.threads)
        torch.manual_seed(self.config.seed * self.world + self.rank)
        if self._group is None:
            self._group = Group(self.rank, self.world, self.env.listen["rpc"], self.env.master["master"])
        # The training mode would switch dropout on, with which log-probs no longer equal the engines'.
        self._model = _load_model(Path(self.config.model.path)).eval()
        self._gradients = Gradients(self._model.parameters(), self._group)
        self._optimizer = self._make_optimizer(self.config.train.learning_rate, self.config.train.weight_decay)
        if self.config.train.max_tokens_per_micro_batch:
            self._check_packing()
        if resume is not None:
            self._load(resume)
        elif self.config.train.kl_coef:
            self._keep_start_policy()

    def _make_optimizer(self, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, weight_decay=weight_decay, betas=_BETAS, foreach=True
        )

    def _check_packing(self) -> None:
        """Samples of a packed row must not see each other; not every model and version of transformers takes care.

        Raises:
            TrainerError: they do.
        """
        row = torch.tensor([[1, 2, 3, 4, 5, 6]])
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
        with torch.no_grad():
            packed = self._model(input_ids=row, position_ids=positions, use_cache=False).logits[0, 3:]
            alone = self._model(input_ids=row[:, 3:], use_cache=False).logits[0]
        if not torch.allclose(packed, alone, atol=1e-3):
            raise TrainerError(
                f"{self.config.model.path}: this model does not keep packed samples apart "
                f"(logits differ by {float((packed - alone).abs().max()):.2g}); set "
                "train.max_tokens_per_micro_batch = 0"
            )

    @property
    def model(self) -> torch.nn.Module:
        """The policy of this rank."""
        return self._model

    # ------------------------------------------------------------------------------------------ learning
    def warm_start(self) -> dict[str, float]:
        warm = self.config.train.warm_start
        if warm is None:
            return {}
        tokenizer = ChatTokenizer(self.config.model.path, self.config.model.chat_template)
        examples = read_examples(warm, tokenizer)
        optimizer = self._make_optimizer(warm.learning_rate, 0.0)
        ramp = max(1, round(_RAMP * warm.steps))
        started, said, loss = time.monotonic(), time.monotonic(), 0.0
        for step, rows in enumerate(batches(len(examples), warm.batch_size, warm.steps, self.config.seed)):
            for group in optimizer.param_groups:
                group["lr"] = warm.learning_rate * min(1.0, (step + 1) / ramp) * (1.0 - step / warm.steps)
            loss = self._supervised_step(example_batch([examples[row] for row in rows[self.rank :: self.world]]))
            optimizer.step()
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                log.info("warm start: step %d of %d, loss %.3f", step + 1, warm.steps, loss)
        if self.config.train.kl_coef:
            self._keep_start_policy()
        seconds = time.monotonic() - started
        log.info("warm start: %d steps in %.1f s, last loss %.3f", warm.steps, seconds, loss)
        return {"loss": loss, "seconds": seconds}

    def _supervised_step(self, batch: MicroBatch) -> float:
        """Gradients of one step; returns the mean loss over the answer tokens of all ranks."""
        assert self._group is not None
        self._gradients.zero()
        total = self._logprobs(self._model, batch, temperature=1.0)[batch.mask].sum()
        sums = self._group.sum_(torch.stack([total.detach(), batch.mask.sum().float()]))
        torch.autograd.backward(-total / sums[1])
        self._gradients.reduce_and_clip(self.config.train.max_grad_norm)
        return float(-sums[0] / sums[1])

    def train(self, batch: TrainBatch) -> dict[str, float]:
        train = self.config.train
        updates = [
            self._update(batch.rollout_id, list(self._micro_batches(batch, number)))
            for number in range(train.updates_per_step)
        ]
        return {
            name: max(update[name] for update in updates)
            if name == "logprob_gap"
            else sum(update[name] for update in updates) / len(updates)
            for name in updates[0]
        }

    def _micro_batches(self, batch: TrainBatch, update: int) -> Iterator[MicroBatch]:
        train = self.config.train
        if train.max_tokens_per_micro_batch:
            return packed_micro_batches(batch, update, train.updates_per_step)
        rows = np.arange(update, len(batch), train.updates_per_step)
        return rollout_micro_batches(batch, rows, train.micro_batch_size)

    def _update(self, rollout_id: int, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One optimizer step on some samples of the shard."""
        assert self._group is not None
        train = self.config.train
        mine = torch.tensor([float(sum(int(micro.mask.sum()) for micro in micro_batches))])
        tokens = max(1.0, float(self._group.sum_(mine)))
        self._gradients.zero()
        sums = torch.zeros(4)
        gap = 0.0
        for micro in micro_batches:
            logprobs = self._logprobs(self._model, micro, self.config.rollout.temperature)[micro.mask]
            old = micro.old_logprobs[micro.mask]
            found = policy_loss(
                logprobs,
                old,
                micro.advantages[micro.mask],
                clip_low=train.clip_low,
                clip_high=train.clip_high,
                start_logprobs=self._start_logprobs(micro),
                kl_coef=train.kl_coef,
            )
            torch.autograd.backward(found.loss / tokens)
            distance = (logprobs.detach() - old).abs()
            if distance.numel():
                gap = max(gap, float(distance.max()))
            sums += torch.stack([found.loss.detach(), found.clipped.float(), found.kl, -logprobs.detach().sum()])
        norm = self._gradients.reduce_and_clip(train.max_grad_norm)
        if not np.isfinite(norm):
            raise TrainerError(
                f"the gradient of rollout {rollout_id} is not finite: lower train.learning_rate, or look for "
                "samples with broken log-probs"
            )
        self._optimizer.step()
        loss, clipped, kl, surprise = (self._group.sum_(sums) / tokens).tolist()
        gaps = torch.zeros(self.world)
        gaps[self.rank] = gap
        return {
            "loss": loss,
            "grad_norm": norm,
            "clipped": clipped,
            "kl": kl,
            "surprise": surprise,
            "logprob_gap": float(self._group.sum_(gaps).max()),
        }

    def _logprobs(self, model: torch.nn.Module, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """`[b, t - 1]` log-probabilities of the tokens that follow."""
        packed = {} if micro.positions is None else {"position_ids": micro.positions}
        logits = model(input_ids=micro.token_ids, use_cache=False, **packed).logits[:, :-1]
        return token_logprobs(logits, micro.targets, temperature)

    def _start_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        if not self.config.train.kl_coef:
            return None
        with torch.no_grad():
            return self._logprobs(self._start_policy, micro, self.config.rollout.temperature)[micro.mask]

    def _keep_start_policy(self) -> None:
        self._start_policy = copy.deepcopy(self._model).requires_grad_(False)
        for parameter in self._start_policy.parameters():
            parameter.grad = None

    # ------------------------------------------------------------------------------------------ files
    def save(self, path: Path) -> list[ManifestFile]:
        files = [path / f"random-{self.rank:05d}.pt"]
        files[0].write_bytes(_packed({"torch": torch.get_rng_state()}))
        if self.rank == 0:
            files += self._write_model(path)
            files.append(path / _OPTIMIZER)
            files[-1].write_bytes(_packed(self._optimizer.state_dict()))
            if self.config.train.kl_coef:
                files.append(path / _START_POLICY)
                _save_tensors(self._start_policy, files[-1])
        return manifest_of(path, files)

    def _load(self, resume: CheckpointRef) -> None:
        weights = [entry.file for entry in resume.files if entry.file.startswith("model")]
        for name in weights or [_WEIGHTS]:
            resume.checked(name)
        self._model.load_state_dict(_load_model(Path(resume.path)).state_dict())
        self._optimizer.load_state_dict(_unpacked(resume.checked(_OPTIMIZER)))
        # The learning rate is the config's: it may have been changed on purpose between two attempts.
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.train.learning_rate
            group["weight_decay"] = self.config.train.weight_decay
        torch.set_rng_state(_unpacked(resume.checked(f"random-{self.rank:05d}.pt"))["torch"])
        if self.config.train.kl_coef:
            self._keep_start_policy()
            _load_tensors(self._start_policy, resume.checked(_START_POLICY))

    def export_weights(self, path: Path) -> None:
        if self.rank:
            return
        path.mkdir()
        self._write_model(path)
        sync_tree(path)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(self._model.state_dict())

    def _write_model(self, path: Path) -> list[Path]:
        """Make `path` a complete HF model directory; returns the files that make it one."""
        save: Any = self._model.save_pretrained
        save(str(path))
        # What the model came with wins over what this transformers writes: other programs and versions read it too.
        copy_model_files(Path(self.config.model.path), path, self.config.model.chat_template)
        return sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith(_NOT_MODEL))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def _load_model(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    silence: Any = transformers_logging.disable_progress_bar
    silence()
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model: torch.nn.Module = load(str(path), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise TrainerError(f"{path}: not a causal LM that transformers can load ({text})") from error
    return model


def _packed(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _unpacked(path: Path) -> Any:
    # weights_only: tensors and plain containers, nothing that could run code.
    return torch.load(path, map_location="cpu", weights_only=True)


def _save_tensors(model: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import save_model

    save_model(model, str(path))


def _load_tensors(model: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import load_model

    load_model(model, str(path))
