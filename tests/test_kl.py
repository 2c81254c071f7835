"""The KL penalty's estimators: values, gradients, and the divergence that each of them pulls down in expectation."""

import math

import pytest
import torch

from memrl.rl.loss import KL_ESTIMATORS, estimate_kl, k1, k3
from tests.test_loss import constant, gradient_of, leaf, loss_of


def test_k3_value_and_gradient():
    differences = [-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0]
    logprobs, ref = leaf([-4.0] * 7), constant([-4.0 + d for d in differences])
    kl = k3(logprobs, ref)
    kl.sum().backward()
    exact = constant([math.expm1(d) - d for d in differences])
    torch.testing.assert_close(kl.detach(), exact, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(logprobs.grad, constant([-math.expm1(d) for d in differences]), atol=1e-12, rtol=1e-9)
    assert (kl >= 0).all()
    assert torch.autograd.gradcheck(lambda x: k3(x, ref), [logprobs], eps=1e-6, atol=1e-7)


def categorical(seed):
    """Logits with gradient and a fixed reference over 6 outcomes, fp64, all outcomes as the batch, and their probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, logits.log_softmax(0), ref, logits.detach().softmax(0)


# estimator -> the divergence whose gradient is its expected gradient on samples from the policy
DIRECTIONS = {"k1": "policy || reference", "k2": "policy || reference", "k3": "reference || policy"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("estimator", DIRECTIONS)
def test_the_expected_gradient_of_each_estimator_is_that_of_a_kl(estimator, seed):
    logits, logprobs, ref, probabilities = categorical(seed)
    divergences = {
        "policy || reference": (logprobs.exp() * (logprobs - ref)).sum(),
        "reference || policy": (ref.exp() * (ref - logprobs)).sum(),
    }
    # The expectation over samples: every outcome once, weighed by how often the policy draws it.
    zeros = torch.zeros(6, dtype=torch.float64)
    loss, _ = loss_of(logprobs, logprobs.detach(), zeros, ref, weights=probabilities, kl_coef=1.0, kl_estimator=estimator)
    expected = gradient_of(divergences.pop(DIRECTIONS[estimator]), logits)
    torch.testing.assert_close(gradient_of(loss, logits), expected, atol=1e-14, rtol=1e-12)
    (other,) = divergences.values()
    assert (gradient_of(loss, logits) - gradient_of(other, logits)).abs().max() > 1e-2


def test_the_expected_values_of_k1_and_k3_are_the_kl_and_k2s_is_not():
    _, logprobs, ref, probabilities = categorical(seed=9)
    kl = (probabilities * (logprobs - ref)).sum().item()
    values = {name: (probabilities * estimate_kl(name, logprobs, ref)).sum().item() for name in KL_ESTIMATORS}
    assert values["k1"] == pytest.approx(kl, rel=1e-12)
    assert values["k3"] == pytest.approx(kl, rel=1e-12)
    assert abs(values["k2"] - kl) > 0.05


def test_k1_differentiated_as_it_stands_would_pull_nowhere():
    logits, logprobs, ref, probabilities = categorical(seed=0)
    naive = (probabilities * (logprobs - ref)).sum()
    torch.testing.assert_close(gradient_of(naive, logits), torch.zeros(6, dtype=torch.float64), atol=1e-15, rtol=0)
    assert gradient_of((probabilities * k1(logprobs, ref)).sum(), logits).abs().max() > 0.1


def test_value_and_gradient_of_k1_and_k2_by_hand():
    differences = [-30.0, -0.5, 0.0, 1e-3, 3.0, 30.0]
    for estimator, power in (("k1", 1), ("k2", 2)):
        logprobs, ref = leaf([-40.0 + d for d in differences]), constant([-40.0] * 6)
        kl = estimate_kl(estimator, logprobs, ref)
        kl.sum().backward()
        torch.testing.assert_close(kl.detach(), constant([d**power / power for d in differences]), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(logprobs.grad, constant(differences), atol=1e-12, rtol=1e-12)


def test_k3_beyond_its_cut_is_constant():
    logprobs = leaf([-30.0, -5.0])
    kl = k3(logprobs, constant([-5.0, -30.0]))
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), constant([math.exp(10) - 11, math.exp(-10) + 9]), rtol=1e-12, atol=0)
    assert logprobs.grad.tolist() == [0.0, 0.0]
