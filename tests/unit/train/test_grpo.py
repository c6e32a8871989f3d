import math

import pytest
import torch

from miles_hpc.train.grpo import policy_loss, token_logprobs

pytestmark = pytest.mark.unit


def tensor(*values, grad=False):
    return torch.tensor(values, requires_grad=grad)


def loss_and_gradient(ratio, advantage, **options):
    logprobs = tensor(math.log(ratio), grad=True)
    found = policy_loss(logprobs, tensor(0.0), tensor(advantage), **{"clip_low": 0.2, "clip_high": 0.3, **options})
    found.loss.backward()
    return found.loss.item(), logprobs.grad.item(), int(found.clipped)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_at_ratio_one_the_gradient_is_that_of_plain_policy_gradient(advantage):
    loss, gradient, clipped = loss_and_gradient(1.0, advantage)
    assert (loss, gradient, clipped) == (pytest.approx(-advantage), pytest.approx(-advantage), 0)


@pytest.mark.parametrize(("ratio", "advantage", "bound"), [(1.4, 2.0, 1.3), (0.7, -2.0, 0.8)])
def test_a_gain_beyond_the_clipping_range_earns_nothing_more(ratio, advantage, bound):
    loss, gradient, clipped = loss_and_gradient(ratio, advantage)
    assert (loss, gradient, clipped) == (pytest.approx(-bound * advantage), 0.0, 1)


@pytest.mark.parametrize(("ratio", "advantage"), [(0.5, 2.0), (1.8, -2.0)])
def test_what_moved_the_wrong_way_is_never_clipped(ratio, advantage):
    loss, gradient, clipped = loss_and_gradient(ratio, advantage)
    assert (loss, clipped) == (pytest.approx(-ratio * advantage), 0)
    assert gradient == pytest.approx(-ratio * advantage)


def test_kl_is_zero_at_the_start_policy_and_grows_away_from_it():
    def kl(start):
        found = policy_loss(
            tensor(-1.0), tensor(-1.0), tensor(0.0), clip_low=0.2, clip_high=0.2, start_logprobs=start, kl_coef=0.5
        )
        assert found.loss.item() == pytest.approx(0.5 * found.kl.item())
        return found.kl.item()

    assert kl(tensor(-1.0)) == 0.0
    assert 0.0 < kl(tensor(-1.2)) < kl(tensor(-2.0))
    assert kl(tensor(-0.5)) == pytest.approx(math.exp(0.5) - 0.5 - 1.0)


def test_no_tokens_cost_nothing():
    nothing = torch.zeros(0)
    found = policy_loss(nothing, nothing, nothing, clip_low=0.2, clip_high=0.2)
    assert (found.loss.item(), found.clipped.item(), found.kl.item()) == (0.0, 0, 0.0)


def test_log_probs_are_those_of_the_tempered_distribution():
    logits = tensor(1.0, 2.0, 4.0)
    at_half = token_logprobs(logits, torch.tensor(1), 0.5)
    assert at_half.item() == pytest.approx(torch.log_softmax(logits * 2, -1)[1].item())
    assert token_logprobs(logits, torch.tensor(1), 0.0) == token_logprobs(logits, torch.tensor(1), 1.0)
    assert token_logprobs(logits.bfloat16(), torch.tensor(1), 1.0).dtype == torch.float32
