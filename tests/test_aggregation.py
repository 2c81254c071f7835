"""What the loss is a mean of: the weights by hand, and every loss x estimator x aggregation against a version of its own.

`Reference` below derives the loss once more: turn by turn, token by token, in numpy, without a packed tensor and with branches
instead of max and min. It knows each token's derivative by hand, and its own values give the finite differences.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from memrl.rl.aggregation import AGGREGATIONS, token_weights, turn_mean
from memrl.rl.loss import KL_ESTIMATORS, LOSSES
from tests.test_loss import loss_of

# Two groups; trajectories of 3, 1 and 2 turns in the first and of 1 turn each in the second.
LENS = [2, 5, 1, 4, 3, 3, 6, 1]
TRAJECTORIES = [0, 0, 0, 1, 2, 2, 3, 4]
GROUPS = [7, 7, 7, 7, 7, 7, 3, 3]
OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.6, "kl_coef": 0.05, "entropy_coef": 0.02}
FIXED = 2  # a seed whose batch reaches every branch; checked below


def ids(*lists):
    return [torch.tensor(values, dtype=torch.int64) for values in lists]


BY_HAND = {
    "token_mean": ([1.0] * 8, 25.0),
    "prompt_mean": ([1 / 18] * 6 + [1 / 7] * 2, 2.0),
    "seq_mean": ([1 / 2, 1 / 5, 1, 1 / 4, 1 / 3, 1 / 3, 1 / 6, 1], 8.0),
    "constant": ([1 / 50] * 8, 5.0),
}


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_weights_and_counts_by_hand(kind):
    weights, count = token_weights(kind, *ids(LENS, TRAJECTORIES, GROUPS), constant=50)
    expected, expected_count = BY_HAND[kind]
    assert weights.dtype == torch.float64
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-15)
    assert count == expected_count
    assert isinstance(count, float)


@pytest.mark.parametrize("kind", ["token_mean", "prompt_mean", "seq_mean"])
def test_a_means_weights_add_up_to_one(kind):
    weights, count = token_weights(kind, *ids(LENS, TRAJECTORIES, GROUPS))
    assert float((weights * torch.tensor(LENS)).sum()) / count == pytest.approx(1, rel=1e-14)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_the_order_of_turns_and_the_names_of_ids_do_not_matter(kind):
    lens, trajectories, groups = ids(LENS, TRAJECTORIES, GROUPS)
    straight, count = token_weights(kind, lens, trajectories, groups)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    # Trajectories may be numbered anew in each group.
    within = torch.tensor([0, 0, 0, 1, 2, 2, 0, 1])
    got, got_count = token_weights(kind, lens[order], within[order], (groups * -(2**40))[order])
    assert torch.equal(got, straight[order])
    assert got_count == count


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_ranks_of_whole_groups_make_up_the_whole(kind):
    lens, trajectories, groups = ids(LENS, TRAJECTORIES, GROUPS)
    whole, count = token_weights(kind, lens, trajectories, groups)
    parts = [slice(0, 6), slice(6, 8), slice(8, 8)]
    shares = [token_weights(kind, lens[part], trajectories[part], groups[part]) for part in parts]
    assert torch.equal(torch.cat([weights for weights, _ in shares]), whole)
    assert sum(count for _, count in shares) == count


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_rank_without_turns_adds_nothing(kind):
    weights, count = token_weights(kind, *ids([], [], []))
    assert weights.shape == (0,)
    assert weights.dtype == torch.float64
    assert count == 0.0


def test_turns_that_were_filtered_out_are_in_no_denominator():
    # Trajectory 1, a single turn, and one turn of trajectory 2 are left out; then the whole second group.
    kept = [0, 1, 2, 5]
    rest = ids(*([values[i] for i in kept] for values in (LENS, TRAJECTORIES, GROUPS)))
    counts = {kind: token_weights(kind, *rest)[1] for kind in AGGREGATIONS}
    assert counts == {"token_mean": 11.0, "prompt_mean": 1.0, "seq_mean": 4.0, "constant": 2.0}
    assert token_weights("prompt_mean", *rest)[0].tolist() == [1 / 11] * 4


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_turn_without_tokens_is_an_error_that_names_it(kind):
    with pytest.raises(ValueError, match="turn 2 has no response tokens"):
        token_weights(kind, *ids([3, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]))


def test_an_unknown_kind_and_a_constant_that_is_not_positive_are_errors():
    with pytest.raises(ValueError, match="aggregation is 'mean'; it must be one of token_mean, prompt_mean, seq_mean, constant"):
        token_weights("mean", *ids([1], [0], [0]))
    for constant in (0, -3, float("nan")):
        with pytest.raises(ValueError, match=r"must be positive \(rl\.aggregation_tokens\)"):
            token_weights("constant", *ids([1], [0], [0]), constant=constant)


def test_turn_mean_by_hand_with_its_gradient():
    values = torch.tensor([1.0, 5.0, 3.0, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    index = torch.tensor([1, 0, 1, 1, 2])
    means = turn_mean(values, index)
    assert means.tolist() == [2.0, 5.0, 2.0, 2.0, 7.0]
    (gradient,) = torch.autograd.grad((means * torch.tensor([1.0, 10.0, 2.0, 6.0, 4.0])).sum(), [values])
    assert gradient.tolist() == [3.0, 10.0, 3.0, 3.0, 4.0]
    assert turn_mean(torch.zeros(0), torch.zeros(0).long()).shape == (0,)


class Reference:
    """The loss of one ragged batch from the formulas, with loops."""

    def __init__(self, seed, lens=LENS, trajectories=TRAJECTORIES, groups=GROUPS):
        rng = np.random.default_rng(seed)
        self.lens, self.trajectories, self.groups = lens, trajectories, groups
        tokens = sum(lens)
        turn_shift = np.repeat(rng.normal(0, 0.6, len(lens)), lens)
        self.old = -rng.exponential(2.0, tokens)
        self.now = self.old + turn_shift + rng.normal(0, 0.5, tokens)
        self.ref = self.old + rng.normal(0, 0.5, tokens)
        self.entropy = rng.exponential(1.0, tokens)
        self.correction = rng.uniform(0, 2, tokens)
        self.advantage = np.repeat(rng.normal(0, 1, len(lens)), lens)
        starts = np.concatenate([[0], np.cumsum(lens)])
        self.turns = [range(starts[i], starts[i + 1]) for i in range(len(lens))]

    def weight(self, aggregation, turn):
        if aggregation == "token_mean":
            return 1 / sum(self.lens)
        if aggregation == "prompt_mean":
            mine = [n for n, group in zip(self.lens, self.groups, strict=True) if group == self.groups[turn]]
            return 1 / sum(mine) / len(set(self.groups))
        if aggregation == "seq_mean":
            return 1 / self.lens[turn] / len(self.lens)
        return 1 / 1024 / len(set(self.trajectories))

    def surrogate(self, ratio, advantage, clip_low, clip_high, dual_clip, **_):
        """-A times the clipped ratio, and its derivative by the ratio."""
        if advantage >= 0:
            return (-advantage * ratio, -advantage) if ratio <= 1 + clip_high else (-advantage * (1 + clip_high), 0.0)
        if dual_clip is not None and ratio > dual_clip:
            return -advantage * dual_clip, 0.0
        return (-advantage * ratio, -advantage) if ratio >= 1 - clip_low else (-advantage * (1 - clip_low), 0.0)

    def policy(self, kind, t, turn, now, frozen, options):
        """A token's pg, and d pg / d logprob for every token of its turn; `frozen` stands where a gradient stops."""
        by_token = dict.fromkeys(turn, 0.0)
        a = self.advantage[t]
        if kind == "reinforce":
            value, by_token[t] = -a * now[t], -a
        elif kind == "cispo":
            weight = min(math.exp(frozen[t] - self.old[t]), 1 + options["clip_high"])
            value, by_token[t] = -weight * a * now[t], -weight * a
        elif kind == "ppo":
            ratio = math.exp(now[t] - self.old[t])
            value, slope = self.surrogate(ratio, a, **options)
            by_token[t] = slope * ratio
        else:
            ratio = math.prod(math.exp(now[s] - self.old[s]) for s in turn) ** (1 / len(turn))
            value, slope = self.surrogate(ratio, a, **options)
            by_token = dict.fromkeys(turn, slope * ratio / len(turn))
        return value, by_token

    def kl(self, estimator, t, now, frozen):
        """A token's penalty and its derivative."""
        if estimator == "k1":
            d = frozen[t] - self.ref[t]
            return d * (1 + now[t] - frozen[t]), d
        d = now[t] - self.ref[t]
        return (d * d / 2, d) if estimator == "k2" else (math.exp(-d) + d - 1, 1 - math.exp(-d))

    def loss(self, kind, estimator, aggregation, options, now=None):
        now = self.now if now is None else now
        value, gradient = 0.0, np.zeros(len(now))
        for index, turn in enumerate(self.turns):
            w = self.weight(aggregation, index)
            for t in turn:
                pg, slopes = self.policy(kind, t, turn, now, self.now, options)
                kl, kl_slope = self.kl(estimator, t, now, self.now)
                value += w * (self.correction[t] * pg + options["kl_coef"] * kl - options["entropy_coef"] * self.entropy[t])
                gradient[t] += w * options["kl_coef"] * kl_slope
                for s, slope in slopes.items():
                    gradient[s] += w * self.correction[t] * slope
        return value, gradient

    def packed(self, kind, estimator, aggregation, options, dtype, order=None):
        """The same by `policy_loss`, with the turns in any order; value, gradients by token in the original order, metrics."""
        order = range(len(self.turns)) if order is None else order
        tokens = [t for i in order for t in self.turns[i]]
        turn_index = torch.tensor([n for n, i in enumerate(order) for _ in self.turns[i]])
        lens, trajectories, groups = ids(*([values[i] for i in order] for values in (self.lens, self.trajectories, self.groups)))
        weights, count = token_weights(aggregation, lens, trajectories, groups)
        take = [torch.tensor(x[tokens], dtype=dtype) for x in (self.old, self.advantage, self.ref, self.correction)]
        now, entropies = (torch.tensor(x[tokens], dtype=dtype, requires_grad=True) for x in (self.now, self.entropy))
        loss, metrics = loss_of(
            now,
            *take[:3],
            weights=(weights / count)[turn_index].to(dtype),
            turn_index=turn_index,
            entropies=entropies,
            correction=take[3],
            kind=kind,
            kl_estimator=estimator,
            **options,
        )
        loss.backward()
        gradients = [np.zeros(len(tokens)) for _ in range(2)]
        for gradient, leaf in zip(gradients, (now, entropies), strict=True):
            gradient[tokens] = leaf.grad.double().numpy()
        return loss.item(), *gradients, metrics


CASES = list(itertools.product(LOSSES, KL_ESTIMATORS, AGGREGATIONS))


@pytest.mark.parametrize(("kind", "estimator", "aggregation"), CASES)
def test_values_and_gradients_by_hand_and_by_finite_differences(kind, estimator, aggregation):
    reference = Reference(FIXED)
    case = (kind, estimator, aggregation, OPTIONS)
    value, gradient = reference.loss(*case)
    differences, step = np.zeros(len(gradient)), 1e-6
    for t in range(len(gradient)):
        offset = step * (np.arange(len(gradient)) == t)
        above, below = (reference.loss(*case, now=reference.now + sign * offset)[0] for sign in (1, -1))
        differences[t] = (above - below) / (2 * step)
    got, got_gradient, entropy_gradient, _ = reference.packed(*case, torch.float64)
    assert got == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(got_gradient, gradient, atol=1e-14, rtol=1e-12)
    np.testing.assert_allclose(got_gradient, differences, atol=1e-9)
    by_turn = [reference.weight(aggregation, turn) for turn in range(len(LENS))]
    np.testing.assert_allclose(entropy_gradient, -0.02 * np.repeat(by_turn, LENS), rtol=1e-14)


def test_the_fixed_batch_reaches_every_branch_away_from_its_kinks():
    # Else the finite differences above would prove less than they seem to, or be taken across a kink.
    reference = Reference(FIXED)
    log_ratio = reference.now - reference.old
    by_turn = np.concatenate([np.full(len(turn), log_ratio[turn].mean()) for turn in reference.turns])
    positive = reference.advantage > 0
    for ratio in (np.exp(log_ratio), np.exp(by_turn)):
        assert min(abs(ratio - bound).min() for bound in (0.8, 1.3, 1.6)) > 1e-4
        assert {0, 1} <= set((ratio[positive] > 1.3).astype(int))
        assert (ratio[positive] < 0.8).any()
        assert {0, 1, 2} <= set(np.digitize(ratio[~positive], [0.8, 1.6]))


def ragged(seed):
    rng = np.random.default_rng(100 + seed)
    turns = rng.integers(1, 6, 30)
    trajectories = np.repeat(np.arange(30), turns)
    return Reference(seed, rng.integers(1, 12, len(trajectories)).tolist(), trajectories.tolist(), (trajectories // 6).tolist())


@pytest.mark.parametrize(("kind", "estimator", "aggregation"), CASES)
def test_random_ragged_batches_equal_the_loops(kind, estimator, aggregation):
    for seed, dual_clip in ((1, 3.0), (2, 1.5), (3, None)):
        reference = ragged(seed)
        case = (kind, estimator, aggregation, OPTIONS | {"dual_clip": dual_clip})
        value, gradient = reference.loss(*case)
        order = np.random.default_rng(seed).permutation(len(reference.turns)).tolist()
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            got, got_gradient, _, metrics = reference.packed(*case, dtype, order)
            assert got == pytest.approx(value, abs=tolerance)
            np.testing.assert_allclose(got_gradient, gradient, atol=tolerance)
        straight = reference.packed(*case, torch.float32)[3]
        for name, total in metrics.items():
            assert total.item() == pytest.approx(straight[name].item(), rel=1e-5, abs=1e-4)
