"""The policy loss: every branch in closed form, its gradients, and an independent version in numpy.

The penalty's estimators are tested in `test_kl.py`; every combination of loss, estimator and aggregation is compared with loops
and finite differences in `test_aggregation.py`.
"""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from memrl.config import RLOptions
from memrl.rl.loss import KL_ESTIMATORS, LOSSES, MAX_LOG_RATIO, LossOptions, k3, policy_loss
from memrl.rl.update import loss_options

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
RATIOS_OF_THE_LOSS = {"ppo": {"clip_frac", "dual_clip_frac"}, "gspo": {"clip_frac", "dual_clip_frac"}, "cispo": {"clip_frac"}}


def leaf(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def constant(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def loss_of(logprobs, old_logprobs, advantages, ref_logprobs=None, *, num_tokens=None, weights=None, **others):
    """`policy_loss` with its options by name, and with `num_tokens` for weights of 1 / num_tokens."""
    options = LossOptions(**{field.name: others.pop(field.name) for field in fields(LossOptions) if field.name in others})
    weights = torch.full_like(old_logprobs, 1 / num_tokens) if weights is None else weights
    return policy_loss(logprobs, old_logprobs, advantages, options, weights=weights, ref_logprobs=ref_logprobs, **others)


def random_batch(num_tokens, seed, dtype=torch.float64):
    """Log-probabilities whose ratios fall into every branch, on both sides of every bound."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2.0, num_tokens)
    now = old + rng.normal(0, 0.8, num_tokens)
    ref = old + rng.normal(0, 0.5, num_tokens)
    advantages = rng.normal(0, 1, num_tokens)
    return [torch.tensor(values, dtype=dtype) for values in (now, old, advantages, ref)]


def numpy_loss(now, old, advantages, ref, num_tokens, clip_low, clip_high, dual_clip, kl_coef):
    """Token by token, from the formulas and with branches instead of max and min; also d loss / d now."""
    loss, gradient, sums = (
        0.0,
        np.zeros(len(now)),
        dict.fromkeys(("pg_loss", "clip_frac", "dual_clip_frac", "kl"), 0.0),
    )
    for t, (logprob, old_logprob, a) in enumerate(zip(now, old, advantages, strict=True)):
        ratio = math.exp(logprob - old_logprob)
        if a >= 0:
            clipped = ratio > 1 + clip_high
            value = a * min(ratio, 1 + clip_high)
        else:
            clipped = ratio < 1 - clip_low
            value = a * max(ratio, 1 - clip_low)
        capped = a < 0 and dual_clip is not None and ratio > dual_clip
        if capped:
            value = a * dual_clip
        loss -= value
        gradient[t] = 0.0 if clipped or capped else -a * ratio
        sums["pg_loss"] -= value
        sums["clip_frac"] += clipped
        sums["dual_clip_frac"] += capped
        if ref is not None:
            kl = math.exp(ref[t] - logprob) - (ref[t] - logprob) - 1
            loss += kl_coef * kl
            gradient[t] += kl_coef * (1 - math.exp(ref[t] - logprob))
            sums["kl"] += kl
    return loss / num_tokens, gradient / num_tokens, sums


# advantage, ratio, dual clip -> value of the token's loss, and d loss / d logprob
BRANCHES = {
    "A>0, below the range: still pushed up": (1.5, 0.5, 3.0, -1.5 * 0.5, -1.5 * 0.5),
    "A>0, inside": (1.5, 1.1, 3.0, -1.5 * 1.1, -1.5 * 1.1),
    "A>0, between the two bounds' sizes": (1.5, 1.25, 3.0, -1.5 * 1.25, -1.5 * 1.25),
    "A>0, above: clipped": (1.5, 1.4, 3.0, -1.5 * 1.3, 0.0),
    "A>0, far above: no dual clip": (1.5, 50.0, 3.0, -1.5 * 1.3, 0.0),
    "A<0, far below: clipped": (-1.5, 0.01, 3.0, 1.5 * 0.8, 0.0),
    "A<0, below: clipped": (-1.5, 0.75, 3.0, 1.5 * 0.8, 0.0),
    "A<0, inside": (-1.5, 0.85, 3.0, 1.5 * 0.85, 1.5 * 0.85),
    "A<0, above: still pushed down": (-1.5, 2.9, 3.0, 1.5 * 2.9, 1.5 * 2.9),
    "A<0, above the dual clip": (-1.5, 3.1, 3.0, 1.5 * 3.0, 0.0),
    "A<0, above, a tighter dual clip": (-1.5, 2.0, 1.6, 1.5 * 1.6, 0.0),
    "A<0, above, dual clip off": (-1.5, 50.0, None, 1.5 * 50.0, 1.5 * 50.0),
    "A<0, below, dual clip off": (-1.5, 0.5, None, 1.5 * 0.8, 0.0),
    "A>0, above, dual clip off": (1.5, 5.0, None, -1.5 * 1.3, 0.0),
    "A=0": (0.0, 5.0, 3.0, 0.0, 0.0),
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_value_and_gradient_of_every_branch(branch):
    advantage, ratio, dual_clip, value, gradient = BRANCHES[branch]
    logprobs = leaf([-2.0 + math.log(ratio)])
    loss, metrics = loss_of(logprobs, constant([-2.0]), constant([advantage]), num_tokens=1, dual_clip=dual_clip, **CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    assert metrics["pg_loss"].item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    is_dual = dual_clip is not None and advantage < 0 and ratio > dual_clip
    assert metrics["dual_clip_frac"].item() == is_dual
    assert metrics["clip_frac"].item() == (gradient == 0 and advantage != 0 and not is_dual)
    assert metrics["ratio"].item() == pytest.approx(ratio, rel=1e-12)


def test_the_defaults_are_the_originals():
    now, old, advantages, ref = random_batch(500, seed=0)
    defaults = loss_of(now, old, advantages, ref, num_tokens=500)[0]
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "kl_coef": 0.001}
    spelt_out = loss_of(now, old, advantages, ref, num_tokens=500, **options)[0]
    assert torch.equal(defaults, spelt_out)


def test_on_policy_the_gradient_is_that_of_reinforce():
    old = constant([-0.1, -2.0, -7.5, 0.0])
    logprobs = old.clone().requires_grad_()
    advantages = constant([0.5, -1.25, 2.0, -0.75])
    loss, metrics = loss_of(logprobs, old, advantages, num_tokens=10)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 10, atol=1e-15, rtol=0)
    assert loss.item() == pytest.approx(-0.05, rel=1e-12)
    assert metrics["clip_frac"] == metrics["dual_clip_frac"] == metrics["approx_kl"] == 0
    assert metrics["ratio"] == 4


def test_the_penalty_adds_kl_coef_times_k3():
    now, old, advantages, ref = random_batch(50, seed=1)
    now.requires_grad_()
    without = loss_of(now, old, advantages, None, num_tokens=50, kl_coef=0.5)
    with_penalty = loss_of(now, old, advantages, ref, num_tokens=50, kl_coef=0.5)
    difference = with_penalty[0] - without[0]
    torch.testing.assert_close(difference, 0.5 * k3(now, ref).mean(), atol=1e-12, rtol=0)
    assert "kl" not in without[1]
    torch.testing.assert_close(with_penalty[1]["kl"], k3(now, ref).sum().detach(), atol=1e-12, rtol=0)


def test_gradients_flow_through_the_current_logprobs_alone():
    now, old, advantages, ref = (values.requires_grad_() for values in random_batch(40, seed=2))
    kl_only = loss_of(now, old.detach(), torch.zeros(40).double(), ref.detach(), num_tokens=1, kl_coef=0.1)[0]
    (gradient,) = torch.autograd.grad(kl_only, [now])
    torch.testing.assert_close(gradient, 0.1 * (1 - (ref - now).exp()).detach(), atol=1e-12, rtol=0)
    loss, metrics = loss_of(now, old.detach(), advantages.detach(), ref.detach(), num_tokens=1)
    assert loss.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("dual_clip", [3.0, 1.5, None])
@pytest.mark.parametrize("with_ref", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_equal_an_independent_version(seed, with_ref, dual_clip):
    now, old, advantages, ref = random_batch(300, seed=seed)
    ref = ref if with_ref else None
    options = {
        "num_tokens": 700,
        "clip_low": 0.15,
        "clip_high": 0.28,
        "dual_clip": dual_clip,
        "kl_coef": 0.05,
    }
    arrays = [None if values is None else values.numpy() for values in (now, old, advantages, ref)]
    value, gradient, sums = numpy_loss(*arrays, **options)
    assert sums["clip_frac"] > 10
    assert sums["dual_clip_frac"] > 3 or dual_clip is None
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        logprobs = now.detach().to(dtype, copy=True).requires_grad_()
        others = [None if values is None else values.to(dtype) for values in (old, advantages, ref)]
        loss, metrics = loss_of(logprobs, *others, **options)
        loss.backward()
        assert loss.item() == pytest.approx(value, abs=tolerance)
        np.testing.assert_allclose(logprobs.grad.numpy(), gradient, atol=tolerance)
        for name in ("clip_frac", "dual_clip_frac"):
            assert metrics[name].item() == sums[name]
        assert metrics["pg_loss"].item() == pytest.approx(sums["pg_loss"], abs=1000 * tolerance)
        assert with_ref == ("kl" in metrics)
        if with_ref:
            assert metrics["kl"].item() == pytest.approx(sums["kl"], abs=1000 * tolerance)


def test_gradient_equals_finite_differences():
    now, old, advantages, ref = random_batch(60, seed=5)
    ratio = (now - old).exp()
    # At a kink both one-sided derivatives are right, and a finite difference is neither.
    away = torch.stack([(ratio - bound).abs() for bound in (0.8, 1.3, 3.0)]).amin(0) > 1e-3
    now, old, advantages, ref = (values[away] for values in (now, old, advantages, ref))
    assert torch.autograd.gradcheck(
        lambda x: loss_of(x, old, advantages, ref, num_tokens=7, kl_coef=0.1, **CLIP)[0],
        [now.requires_grad_()],
        eps=1e-6,
        atol=1e-8,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_add_up_to_the_whole_with_a_common_denominator(dtype):
    now, old, advantages, ref = random_batch(101, seed=6, dtype=dtype)
    now.requires_grad_()
    options = {"num_tokens": 101, "kl_coef": 0.1}
    whole, whole_metrics = loss_of(now, old, advantages, ref, **options)
    (whole_gradient,) = torch.autograd.grad(whole, [now])
    for cuts in ([50, 51], [1, 99, 1], [0, 101], [33] * 3 + [2]):
        parts = [x.split(cuts) for x in (now, old, advantages, ref)]
        results = [loss_of(*part, **options) for part in zip(*parts, strict=True)]
        total = sum(loss for loss, _ in results)
        torch.testing.assert_close(total, whole, atol=1e-6, rtol=1e-6)
        (gradient,) = torch.autograd.grad(total, [now])
        torch.testing.assert_close(gradient, whole_gradient, atol=1e-7, rtol=1e-6)
        for name, value in whole_metrics.items():
            torch.testing.assert_close(sum(metrics[name] for _, metrics in results), value, atol=1e-4, rtol=1e-6)


def test_the_denominator_scales_loss_and_gradient_and_not_the_metrics():
    now, old, advantages, ref = random_batch(30, seed=7)
    now.requires_grad_()
    one, one_metrics = loss_of(now, old, advantages, ref, num_tokens=1)
    many, many_metrics = loss_of(now, old, advantages, ref, num_tokens=1000)
    torch.testing.assert_close(many * 1000, one, atol=1e-12, rtol=1e-12)
    gradients = [torch.autograd.grad(loss, [now])[0] for loss in (one, many)]
    torch.testing.assert_close(gradients[1] * 1000, gradients[0], atol=1e-12, rtol=1e-12)
    assert one_metrics == many_metrics


@pytest.mark.parametrize("dual_clip", [3.0, None])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("difference", [1e4, 100.0, 89.0, -89.0, -100.0, -1e4])
def test_extreme_log_ratios_stay_finite(difference, estimator, kind, dual_clip):
    old = torch.tensor([-3.0, -3.0, -3.0])
    logprobs = (old + difference).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.0])
    options = {"kind": kind, "kl_estimator": estimator, "dual_clip": dual_clip, "turn_index": torch.tensor([0, 0, 1])}
    loss, metrics = loss_of(logprobs, old, advantages, old, num_tokens=3, **options)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in metrics.values())


def test_log_ratios_inside_the_bound_are_exact():
    logprobs = leaf([MAX_LOG_RATIO - 0.5 - 30.0])
    loss, _ = loss_of(logprobs, constant([-30.0]), constant([-1.0]), num_tokens=1, dual_clip=None)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(MAX_LOG_RATIO - 0.5), rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(math.exp(MAX_LOG_RATIO - 0.5), rel=1e-12)


def test_inputs_are_never_written_to():
    inputs = random_batch(50, seed=8)
    copies = [values.clone() for values in inputs]
    inputs[0].requires_grad_()
    loss_of(*inputs, num_tokens=50)[0].backward()
    for values, copy in zip(inputs, copies, strict=True):
        assert torch.equal(values.detach(), copy)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("estimator", [None, *KL_ESTIMATORS])
def test_no_tokens_give_zero_loss_with_a_graph(estimator, kind):
    # A rank without tokens still has to call backward, because ZeRO-3 gathers weights in it.
    weight = torch.ones(3, requires_grad=True)
    none = torch.zeros(0)
    logprobs = (weight * 2)[:0]
    options = {"entropies": (weight * 3)[:0], "correction": none, "turn_index": none.long(), "entropy_coef": 0.1}
    ref = {} if estimator is None else {"ref_logprobs": none, "kl_estimator": estimator}
    loss, metrics = loss_of(logprobs, none, none, **ref, **options, weights=none, kind=kind)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(value == 0 for value in metrics.values())


def test_metrics_are_sums_over_tokens():
    ratios = [0.5, 1.1, 4.0, 4.0]
    advantages = [-1.0, 1.0, -1.0, 1.0]
    logprobs, old = constant([math.log(r) for r in ratios]), constant([0.0] * 4)
    ref = constant([0.3] * 4)
    metrics = loss_of(logprobs, old, constant(advantages), ref, num_tokens=99, **CLIP)[1]
    expected = {
        "pg_loss": 0.8 - 1.1 + 3.0 - 1.3,
        "clip_frac": 2,
        "dual_clip_frac": 1,
        "approx_kl": sum(r - 1 - math.log(r) for r in ratios),
        "ratio": sum(ratios),
        "kl": sum(math.exp(0.3) / r - (0.3 - math.log(r)) - 1 for r in ratios),
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert metrics[name].dtype == torch.float64
        assert metrics[name].item() == pytest.approx(value, rel=1e-12)


# kind, ratio, advantage -> value and d loss / d logprob at logprob -2, with clip_high 0.3
BRANCHES_OF_OTHERS = {
    "cispo, below the bound": ("cispo", 1.25, 1.5, 1.25 * 1.5 * 2, -1.25 * 1.5),
    "cispo, far below: no lower bound": ("cispo", 0.01, 1.5, 0.01 * 1.5 * 2, -0.01 * 1.5),
    "cispo, just above the bound": ("cispo", 1.35, 1.5, 1.3 * 1.5 * 2, -1.3 * 1.5),
    "cispo, above: the weight is clipped, the gradient stays": ("cispo", 4.0, 1.5, 1.3 * 1.5 * 2, -1.3 * 1.5),
    "cispo, A<0, below": ("cispo", 0.5, -1.5, -0.5 * 1.5 * 2, 0.5 * 1.5),
    "cispo, A<0, above: the same bound, no dual clip": ("cispo", 50.0, -1.5, -1.3 * 1.5 * 2, 1.3 * 1.5),
    "cispo, A=0": ("cispo", 4.0, 0.0, 0.0, 0.0),
    "reinforce, any ratio": ("reinforce", 50.0, 1.5, 1.5 * 2, -1.5),
    "reinforce, A<0": ("reinforce", 0.01, -1.5, -1.5 * 2, 1.5),
}


@pytest.mark.parametrize("branch", BRANCHES_OF_OTHERS)
def test_value_and_gradient_of_cispo_and_reinforce(branch):
    kind, ratio, advantage, value, gradient = BRANCHES_OF_OTHERS[branch]
    logprobs = leaf([-2.0])
    old = constant([-2.0 - math.log(ratio)])
    loss, metrics = loss_of(logprobs, old, constant([advantage]), num_tokens=1, kind=kind, **CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    assert metrics["pg_loss"].item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert metrics["ratio"].item() == pytest.approx(ratio, rel=1e-12)
    assert "clip_frac" not in metrics or metrics["clip_frac"].item() == (ratio > 1.3)


@pytest.mark.parametrize("branch", BRANCHES)
def test_gspo_treats_a_turns_ratio_as_ppo_treats_a_tokens(branch):
    advantage, ratio, dual_clip, value, gradient = BRANCHES[branch]
    # Three tokens far apart whose geometric mean is the ratio, between the tokens of another turn.
    spread = [math.log(ratio) + shift for shift in (1.7, -0.5, -1.2)]
    logprobs = leaf([-4.0, -5.0 + spread[0], -5.0 + spread[1], -4.0, -5.0 + spread[2]])
    old = constant([-4.0, -5.0, -5.0, -4.0, -5.0])
    loss, metrics = loss_of(
        logprobs,
        old,
        constant([0.0, advantage, advantage, 0.0, advantage]),
        num_tokens=1,
        turn_index=torch.tensor([0, 1, 1, 0, 1]),
        kind="gspo",
        dual_clip=dual_clip,
        **CLIP,
    )
    loss.backward()
    assert loss.item() == pytest.approx(3 * value, rel=1e-12, abs=1e-12)
    # Each token's surrogate moves all three logprobs by a third.
    np.testing.assert_allclose(logprobs.grad, np.array([0, 1, 1, 0, 1]) * gradient, rtol=1e-12, atol=1e-12)
    assert metrics["ratio"].item() == pytest.approx(2 + 3 * ratio, rel=1e-12)
    is_dual = dual_clip is not None and advantage < 0 and ratio > dual_clip
    assert metrics["dual_clip_frac"].item() == 3 * is_dual
    assert metrics["clip_frac"].item() == 3 * (gradient == 0 and advantage != 0 and not is_dual)


def test_gspo_of_turns_of_one_token_is_ppo():
    now, old, advantages, ref = random_batch(200, seed=3)
    options = {"num_tokens": 200, "dual_clip": 1.5, "turn_index": torch.arange(200).flip(0), **CLIP}
    gradients = []
    for kind in ("ppo", "gspo"):
        logprobs = now.clone().requires_grad_()
        loss_of(logprobs, old, advantages, ref, kind=kind, **options)[0].backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients, atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_every_kind_has_the_gradient_of_reinforce(kind):
    old = constant([-0.1, -2.0, -7.5, 0.0])
    logprobs = old.clone().requires_grad_()
    # Within a turn all tokens carry the same, so a turn's mean ratio moves each of them as its own would.
    advantages = constant([0.5, -1.25, -1.25, 0.5])
    loss_of(logprobs, old, advantages, num_tokens=10, kind=kind, turn_index=torch.tensor([0, 1, 1, 0]))[0].backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 10, atol=1e-15, rtol=0)


def gradient_of(value, logits):
    return torch.autograd.grad(value, [logits], retain_graph=True)[0]


def test_the_entropy_bonus_pushes_the_entropy_up_by_its_weight():
    logits = leaf([0.5, -1.0, 2.0])
    logprobs = logits.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum()
    now, old = logprobs[:2], logprobs[:2].detach()
    options = {"weights": constant([0.25, 0.5]), "entropies": entropy.expand(2)}
    without, _ = loss_of(now, old, constant([1.0, -1.0]), **options)
    with_bonus, _ = loss_of(now, old, constant([1.0, -1.0]), **options, entropy_coef=0.1)
    assert (with_bonus - without).item() == pytest.approx(-0.1 * 0.75 * entropy.item(), rel=1e-12)
    difference = gradient_of(with_bonus, logits) - gradient_of(without, logits)
    torch.testing.assert_close(difference, -0.075 * gradient_of(entropy, logits), atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_correction_weighs_the_policy_gradient_alone(kind):
    now, old, advantages, ref = random_batch(30, seed=9)
    now.requires_grad_()
    options = {"num_tokens": 7, "kind": kind, "turn_index": torch.arange(30) // 3}
    options |= {"entropies": torch.rand(30).double(), "entropy_coef": 0.3, "kl_coef": 0.2}
    correction = torch.tensor([2.0, 2.0, 2.0] * 5 + [0.0] * 15, dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(now, old, advantages, ref, correction=correction, **options)
    # Corrections that are equal within a turn are the same as advantages multiplied by them.
    expected, plain = loss_of(now, old, advantages * correction.detach(), ref, **options)
    assert torch.autograd.grad(loss, [correction], retain_graph=True, allow_unused=True) == (None,)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, [now])[0] for x in (loss, expected)), atol=1e-12, rtol=1e-12)
    assert metrics["pg_loss"].item() == pytest.approx(plain["pg_loss"].item(), rel=1e-12)
    for name in ("kl", "approx_kl", "ratio"):
        assert metrics[name] == plain[name]


@pytest.mark.parametrize("kind", LOSSES)
def test_every_kind_reports_the_metrics_that_make_sense_for_it(kind):
    now, old, advantages, ref = (values.requires_grad_() for values in random_batch(12, seed=11))
    loss, metrics = loss_of(now, old, advantages, ref, num_tokens=12, kind=kind, turn_index=torch.arange(12) // 5)
    assert set(metrics) == {"pg_loss", "approx_kl", "ratio", "kl"} | RATIOS_OF_THE_LOSS.get(kind, set())
    assert loss.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


def test_inputs_that_are_missing_are_errors():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="gspo needs turn_index"):
        loss_of(x, x, x, num_tokens=3, kind="gspo")
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.1, but entropies were not given"):
        loss_of(x, x, x, num_tokens=3, entropy_coef=0.1)


def test_unknown_names_are_errors_that_list_the_known_ones():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="loss is 'grpo'; it must be one of ppo, cispo, gspo, reinforce"):
        loss_of(x, x, x, num_tokens=3, kind="grpo")
    with pytest.raises(ValueError, match="kl_estimator is 'k4'; it must be one of k1, k2, k3"):
        loss_of(x, x, x, x, num_tokens=3, kl_estimator="k4")


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "ref_logprobs", "weights", "entropies", "correction"])
@pytest.mark.parametrize("shape", [(1,), (3, 1), ()])
def test_a_shape_that_would_broadcast_is_an_error_that_names_it(name, shape):
    inputs = dict.fromkeys(("old_logprobs", "advantages", "ref_logprobs", "weights", "entropies", "correction"), torch.zeros(3))
    with pytest.raises(ValueError, match=f"{name} .* must be equal and flat"):
        policy_loss(torch.zeros(3), options=LossOptions(), **inputs | {name: torch.zeros(shape)})


def test_every_setting_of_the_loss_reaches_its_options():
    """Each setting alone is moved off its default, and moves the option of its name and no other."""
    moved = {"kind": "gspo", "clip_low": 0.11, "clip_high": 0.37, "dual_clip": 5.5, "kl_coef": 0.02, "kl_estimator": "k2"}
    moved |= {"entropy_coef": 0.3}
    assert moved.keys() == {field.name for field in fields(LossOptions)}
    assert loss_options(RLOptions()) == LossOptions()
    for name, value in moved.items():
        rl = RLOptions(**{"loss" if name == "kind" else name: value})
        assert loss_options(rl) == LossOptions(**{name: value})
