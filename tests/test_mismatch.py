"""Corrections of the mismatch of sampler and trainer, by hand and against loops."""

import math

import numpy as np
import pytest
import torch

from memrl.rl.mismatch import correction, mismatch_metrics

LOG2 = math.log(2)


def logs(ratios):
    """Trainer and sampler log-probabilities, fp32, whose ratios are the given ones."""
    sampler = torch.full((len(ratios),), -4.0)
    return sampler + torch.tensor(ratios, dtype=torch.float64).log().float(), sampler


def ragged(seed, num_turns=12):
    rng = np.random.default_rng(seed)
    lens = rng.integers(1, 9, num_turns)
    index = np.repeat(np.arange(num_turns), lens)
    sampler = -rng.exponential(2.0, len(index))
    trainer = sampler + rng.normal(0, 0.4, len(index)) + rng.normal(0, 0.6, num_turns)[index]
    return [torch.tensor(x, dtype=torch.float32) for x in (trainer, sampler)] + [torch.tensor(index)]


def test_truncate_is_the_ratio_up_to_the_bound():
    trainer, sampler = logs([0.01, 0.5, 1.0, 1.9, 2.1, 50.0])
    got = correction(trainer, sampler, torch.tensor([0, 0, 1, 1, 1, 2]), "truncate", 2.0)
    torch.testing.assert_close(got, torch.tensor([0.01, 0.5, 1.0, 1.9, 2.0, 2.0]), rtol=1e-6, atol=0)
    assert got.dtype == torch.float32


# the ratios of one turn's tokens, bound 2 -> kept
TURNS = {
    "equal": ([1.0, 1.0, 1.0], True),
    "just inside": ([1.99], True),
    "just above": ([2.01], False),
    "just inside below": ([0.51], True),
    "just below": ([0.49], False),
    "one wild token among tame ones": ([7.0, 1.0, 1.0, 1.0], True),
    "wild tokens that cancel": ([100.0, 0.01], True),
    "all a little too high": ([2.2, 2.3, 2.1], False),
    "the arithmetic mean is inside, the geometric is not": ([0.01, 1.9, 0.9], False),
}


@pytest.mark.parametrize("turn", TURNS)
def test_mask_keeps_or_drops_a_whole_turn_by_its_geometric_mean(turn):
    ratios, kept = TURNS[turn]
    trainer, sampler = logs([*ratios, 1.0, 1.0])
    index = torch.tensor([0] * len(ratios) + [1, 1])
    got = correction(trainer, sampler, index, "mask", 2.0)
    assert got.tolist() == [float(kept)] * len(ratios) + [1.0, 1.0]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("bound", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_random_ragged_turns_equal_a_loop(seed, bound):
    trainer, sampler, index = ragged(seed)
    truncated, masked = (correction(trainer, sampler, index, mode, bound).tolist() for mode in ("truncate", "mask"))
    for turn in range(int(index[-1]) + 1):
        tokens = [t for t in range(len(index)) if index[t] == turn]
        ratios = [math.exp(float(trainer[t]) - float(sampler[t])) for t in tokens]
        mean = math.prod(ratios) ** (1 / len(ratios))
        for t, ratio in zip(tokens, ratios, strict=True):
            assert truncated[t] == pytest.approx(min(ratio, bound), rel=1e-6)
            assert masked[t] == float(1 / bound <= mean <= bound)
    assert bound > 3 or 0 < sum(masked) < len(masked)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_the_order_of_tokens_does_not_matter(mode):
    trainer, sampler, index = ragged(seed=4)
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    straight = correction(trainer, sampler, index, mode, 1.5)
    assert torch.equal(correction(trainer[order], sampler[order], index[order], mode, 1.5), straight[order])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_equal_logprobs_weigh_exactly_one(mode):
    _, sampler, index = ragged(seed=5)
    for bound in (1.0, 2.0):
        assert correction(sampler, sampler, index, mode, bound).tolist() == [1.0] * len(index)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_no_tokens_give_no_weights(mode):
    none = torch.zeros(0)
    assert correction(none, none, none.long(), mode, 2.0).shape == (0,)
    assert [float(x) for x in mismatch_metrics(none, none).values()] == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("difference", [1e4, 200.0, -200.0, -1e4])
def test_extreme_differences_stay_finite(mode, difference):
    sampler = torch.tensor([-3.0, -3.0])
    trainer = sampler + torch.tensor([difference, 0.0])
    got = correction(trainer, sampler, torch.tensor([0, 0]), mode, 2.0)
    expected = {"mask": [0.0, 0.0], "truncate": [2.0 if difference > 0 else 0.0, 1.0]}[mode]
    assert got.tolist() == pytest.approx(expected)
    assert all(torch.isfinite(value) for value in mismatch_metrics(trainer, sampler).values())


def test_nothing_carries_a_gradient():
    trainer, sampler, index = ragged(seed=6)
    trainer.requires_grad_()
    for mode in ("truncate", "mask"):
        assert not correction(trainer, sampler, index, mode, 2.0).requires_grad
    assert not any(value.requires_grad for value in mismatch_metrics(trainer, sampler).values())


def test_metrics_are_sums_over_tokens_by_hand():
    trainer, sampler = logs([2.0, 0.5, 1.0])
    metrics = mismatch_metrics(trainer, sampler)
    assert set(metrics) == {"mismatch_kl", "logprob_diff"}
    assert metrics["logprob_diff"].item() == pytest.approx(2 * LOG2, rel=1e-6)
    assert metrics["mismatch_kl"].item() == pytest.approx((2 - LOG2 - 1) + (0.5 + LOG2 - 1), rel=1e-6)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in metrics.values())


def test_mismatch_kl_is_that_of_the_sampler_to_the_trainer():
    # Over all tokens, each as often as the sampler draws it, an unbiased estimate is the KL itself.
    sampler = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    trainer = torch.tensor([0.25, 0.25, 0.15, 0.35], dtype=torch.float64)
    expected = sum(
        float(p) * float(mismatch_metrics(q.log()[None], p.log()[None])["mismatch_kl"])
        for p, q in zip(sampler, trainer, strict=True)
    )
    assert expected == pytest.approx(float((sampler * (sampler / trainer).log()).sum()), rel=1e-12)
    assert expected != pytest.approx(float((trainer * (trainer / sampler).log()).sum()), rel=1e-2)


def test_small_differences_are_not_lost_to_rounding():
    sampler = torch.full((1000,), -2.0, dtype=torch.float64)
    metrics = mismatch_metrics(sampler + 1e-5, sampler)
    assert metrics["mismatch_kl"].item() == pytest.approx(1000 * 0.5e-10, rel=1e-4)


def test_an_unknown_mode_and_a_bound_below_one_are_errors():
    trainer, sampler, index = ragged(seed=7)
    with pytest.raises(ValueError, match="mismatch is 'clip'; it must be one of truncate, mask"):
        correction(trainer, sampler, index, "clip", 2.0)
    for bound in (0.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"mismatch_bound is .* at least 1"):
            correction(trainer, sampler, index, "mask", bound)
