"""The loss of the GRPO family, over packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossSums:
    """Sums over response tokens; what is divided by which count is the caller's decision."""

    loss: torch.Tensor
    """Clipped policy loss plus weighted KL; has the gradient."""
    clipped: torch.Tensor
    """Tokens whose ratio was clipped."""
    kl: torch.Tensor
    """KL to the start policy, 0 without one."""


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of each target at the sampling temperature, in fp32, as engines report it.

    Args:
        logits: `[..., vocab]`.
        targets: `[...] int64`.
        temperature: of the sampling; 0 (greedy) is taken as 1, as engines do.
    """
    scaled = logits.float() / (temperature or 1.0)
    return torch.log_softmax(scaled, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    start_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossSums:
    """PPO's clipped objective with a group-relative advantage (https://arxiv.org/abs/2402.03300, eq. 3), summed.

    The KL penalty is the unbiased estimator exp(d) - d - 1 with d = start - current (same paper, eq. 4).

    Args:
        logprobs, old_logprobs, advantages: `[tokens]`; response tokens only, old ones as they were when sampled.
        clip_low, clip_high: the ratio is held inside [1 - clip_low, 1 + clip_high].
        start_logprobs: `[tokens]` of the start policy; needed with `kl_coef`.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_gain, held_gain = ratio * advantages, held * advantages
    loss = -torch.minimum(plain_gain, held_gain).sum()
    clipped = (held_gain < plain_gain).sum()
    kl = torch.zeros((), device=logprobs.device)
    if kl_coef and start_logprobs is not None:
        distance = start_logprobs - logprobs
        kl_sum = (torch.exp(distance) - distance - 1.0).sum()
        loss = loss + kl_coef * kl_sum
        kl = kl_sum.detach()
    return LossSums(loss=loss, clipped=clipped, kl=kl)
