"""The rows of the running batch are exact for every attention layout, and the sampler draws what it should."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

torch = pytest.importorskip("torch", reason="torch is not installed (extra `train`)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `train`)")

torch.set_num_threads(1)  # two threads on two busy cores wait for each other


def config(kind: str) -> Any:
    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if kind == "qwen2 with sliding layers":
        window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        return transformers.Qwen2Config(**small, **window)
    if kind == "mistral with a window":
        return transformers.MistralConfig(**small, sliding_window=9)
    if kind == "llama with tied head":
        return transformers.LlamaConfig(**small, tie_word_embeddings=True)
    if kind == "gemma2 with softcaps":
        return transformers.Gemma2Config(**small, head_dim=8, sliding_window=8, query_pre_attn_scalar=8)
    size = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return transformers.GPT2Config(**size, initializer_range=0.3, bos_token_id=None, eos_token_id=1)


KINDS = [
    "qwen2 with sliding layers",
    "mistral with a window",
    "llama with tied head",
    "gemma2 with softcaps",
    "gpt2 with learned positions",
]


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_join_and_leave_at_random_get_exact_logprobs(kind: str, tmp_path: Path) -> None:
    from miles_hpc.engine.embedded.model import BatchModel
    from miles_hpc.engine.embedded.scheduler import Scheduler, Sequence
    from miles_hpc.engine.requests import Request, Result, Sampling

    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(config(kind)).float().eval()
    whole.save_pretrained(tmp_path / "m")
    scheduler = Scheduler(BatchModel(tmp_path / "m"), None, "m", "v0", 5)  # type: ignore[arg-type] # no stop texts here
    rng = random.Random(0)
    done: dict[str, Result] = {}
    requests = []
    for i in range(16):
        ids = [rng.randrange(2, 96) for _ in range(rng.choice([1, 2, 5, 20, 60]))]
        sampling = Sampling(rng.randrange(1, 40), temperature=rng.choice([0.0, 0.6, 1.0]), seed=i)
        requests.append(Request(str(i), ids, sampling))
    arrivals = list(requests)
    steps = 0
    while len(done) < len(requests):
        while arrivals and rng.random() < 0.4:
            request = arrivals.pop(0)
            scheduler.add(Sequence(request, lambda result, rid=request.rid: done.__setitem__(rid, result)))
        if steps == 20:
            scheduler.pause("retract")
            scheduler.resume()
        if scheduler.can_step():
            scheduler.step()
        steps += 1
    worst = 0.0
    for request in requests:
        result = done[request.rid]
        assert len(result.output_ids) == request.sampling.max_new_tokens
        ids = request.input_ids + result.output_ids
        with torch.no_grad():
            logits = whole(torch.tensor([ids])).logits[0, :-1]
        logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
        expected = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)[-len(result.output_ids) :]
        worst = max(worst, (expected - torch.tensor(result.output_logprobs)).abs().max().item())
        if request.sampling.greedy:
            assert result.output_ids == logits.argmax(-1)[-len(result.output_ids) :].tolist()
    assert worst < 1e-4, worst
    assert steps < 400


def test_draws_follow_the_distribution_and_filters_cut_it() -> None:
    from miles_hpc.engine.embedded.sampling import Sampler, noise_key
    from miles_hpc.engine.requests import Sampling

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])
    sampler = Sampler(5)

    def draw(count: int = 20000, **limits: Any) -> list[float]:
        params = [Sampling(**limits)] * count
        keys = [noise_key(seed, index) for seed in range(count // 100) for index in range(100)]
        tokens = sampler.choose(logits.repeat(count, 1), params, keys, [0] * count).tokens
        return [tokens.count(token) / count for token in range(5)]

    expected = torch.softmax(logits, -1).tolist()
    for found, share in zip(draw(), expected, strict=True):
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / 20000)
    hot = torch.softmax(logits / 2.0, -1).tolist()
    for found, share in zip(draw(temperature=2.0), hot, strict=True):
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / 20000)
    two = expected[0] + expected[1]
    for limits in ({"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.3}):
        found = draw(2000, **limits)
        assert found[2:] == [0, 0, 0]
        assert abs(found[0] - expected[0] / two) < 0.06


def test_the_reported_logprob_is_of_the_tempered_distribution_before_filters() -> None:
    from miles_hpc.engine.embedded.sampling import Sampler, noise_key
    from miles_hpc.engine.requests import Sampling

    logits = torch.tensor([[2.0, 1.0, 0.0]])
    sampler = Sampler(3)
    filtered = sampler.choose(logits.clone(), [Sampling(temperature=0.5, top_k=1 + 1)], [noise_key(1, 0)], [3])
    expected = torch.log_softmax(logits / 0.5, -1)[0]
    assert abs(filtered.logprobs[0] - expected[filtered.tokens[0]].item()) < 1e-6
    assert [token for _, token in filtered.top[0]] == [0, 1, 2]
    greedy = sampler.choose(logits.clone(), [Sampling(temperature=0.0)], [0], [0])
    assert greedy.tokens == [0]
    assert abs(greedy.logprobs[0] - torch.log_softmax(logits, -1)[0, 0].item()) < 1e-6


def test_an_architecture_whose_state_rows_cannot_hold_is_refused(tmp_path: Path) -> None:
    from miles_hpc.engine.chat_tokenizer import ModelDirError
    from miles_hpc.engine.embedded.model import BatchModel

    mamba = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_config(mamba).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelDirError, match="is not served by the embedded engine"):
        BatchModel(tmp_path / "m")


def test_a_model_stored_under_other_names_than_it_runs_with_is_updated_too(tmp_path: Path) -> None:
    from miles_hpc.engine.embedded.model import BatchModel
    from miles_hpc.engine.embedded.weights import WeightsError

    experts = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        paths.append(tmp_path / str(seed))
        transformers.AutoModelForCausalLM.from_config(experts).float().save_pretrained(paths[-1])
    served = BatchModel(paths[0])
    logits: Callable[[BatchModel], Any] = lambda model: model.prefill([[3, 4, 5]], 0)  # noqa: E731
    served.replace(paths[1])
    assert torch.allclose(logits(served), logits(BatchModel(paths[1])), atol=1e-5)
    (paths[0] / "model.safetensors").unlink()
    with pytest.raises(WeightsError):
        served.replace(paths[0])


def test_an_engine_whose_thread_fails_says_so_to_everyone(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_hpc.engine.embedded.backend import EmbeddedBackend, EngineDied
    from miles_hpc.engine.embedded.scheduler import Scheduler
    from miles_hpc.engine.requests import Request, Sampling

    def broken(self: Scheduler) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Scheduler, "step", broken)

    async def main() -> None:
        backend = EmbeddedBackend(str(models[0]))
        watch = asyncio.ensure_future(backend.failed())
        with pytest.raises(EngineDied, match="MemoryError: no room"):
            await backend.submit(Request("a", [5], Sampling()))
        with pytest.raises(EngineDied):
            await watch
        with pytest.raises(EngineDied):
            await backend.pause("retract")
        await backend.close()
        assert not backend.load().alive

    asyncio.run(asyncio.wait_for(main(), 30))
