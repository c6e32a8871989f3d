"""Choosing tokens so that a seed gives the same tokens alone and in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles_hpc.engine.requests import Sampling, TokenLogprob, mix64

# Odd 64-bit constants, as signed integers (from splitmix64).
_ODD_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_ODD_2 = 0x94D049BB133111EB - (1 << 64)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def noise_key(seed: int, index: int) -> int:
    """Key of the noise for output token `index` of a request with this seed, as a signed 64-bit integer."""
    return _signed(mix64(mix64(seed) ^ index))


@dataclass(slots=True)
class Chosen:
    """Tokens of one step, row by row."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[TokenLogprob]]


class Sampler:
    """Counter-based sampling: the noise of a token is a function of (seed, index, token id) and of nothing else.

    argmax(logit + Gumbel noise) is a draw from softmax(logits) (Gumbel-max); it is used instead of walking the
    cumulative distribution because a rounding difference of the logits between batch sizes then moves a draw only when
    two perturbed logits are that close, about once in a million tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._token_hash = torch.tensor([_signed(mix64(token)) for token in range(vocab_size)], dtype=torch.int64)

    def _gumbel(self, keys: torch.Tensor) -> torch.Tensor:
        """Standard Gumbel noise `[rows, vocab]` from one key per row."""
        bits = self._token_hash.unsqueeze(0) ^ keys.unsqueeze(1)
        bits.mul_(_ODD_1)
        bits.bitwise_xor_(bits >> 32)
        bits.mul_(_ODD_2)
        uniform = ((bits >> 33) & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
        # -log1p(-u) keeps the resolution at small u, where large noise comes from; u = 1 becomes -inf, never chosen.
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def choose(
        self, logits: torch.Tensor, params: Sequence[Sampling], keys: Sequence[int], tops: Sequence[int]
    ) -> Chosen:
        """One token per row.

        Args:
            logits: `[rows, vocab]` fp32; changed in place.
            params: sampling params of each row.
            keys: `noise_key` of each row; unused for greedy rows.
            tops: how many top log-probs each row wants.
        """
        temperatures = [1.0 if one.greedy else one.temperature for one in params]
        if any(value != 1.0 for value in temperatures):
            logits.div_(torch.tensor(temperatures).unsqueeze(1))
        logprobs = torch.log_softmax(logits, dim=-1)
        for row, one in enumerate(params):
            if not one.greedy and (one.top_p < 1.0 or one.top_k > 0 or one.min_p > 0.0):
                _keep_likely(logits[row], one)
        noisy = [row for row, one in enumerate(params) if not one.greedy]
        if len(noisy) == len(params):
            logits.add_(self._gumbel(torch.tensor(keys)))
        elif noisy:
            logits[noisy] += self._gumbel(torch.tensor([keys[row] for row in noisy]))
        tokens = logits.argmax(dim=-1)
        picked = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        top: list[list[TokenLogprob]] = [[] for _ in params]
        for row, count in enumerate(tops):
            if count:
                top[row] = top_logprobs(logprobs[row], count)
        return Chosen(tokens.tolist(), picked.tolist(), top)


def top_logprobs(logprobs: torch.Tensor, count: int) -> list[TokenLogprob]:
    """The `count` most probable tokens of one distribution `[vocab]`, best first."""
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def _keep_likely(logits: torch.Tensor, params: Sampling) -> None:
    """Mask in place what top-k, top-p and min-p leave out; the most probable token always stays."""
    ordered, ids = logits.sort(descending=True, stable=True)
    probabilities = torch.softmax(ordered, dim=-1)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if params.top_p < 1.0:
        drop |= probabilities.cumsum(0) - probabilities >= params.top_p
    if params.top_k > 0:
        drop[params.top_k :] = True
    if params.min_p > 0.0:
        drop |= probabilities < params.min_p * probabilities[0]
    drop[0] = False
    logits[ids[drop]] = -torch.inf
