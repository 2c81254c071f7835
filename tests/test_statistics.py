"""Intervals and p-values against closed forms, enumeration and simulation."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from memrl.evaluation.statistics import bootstrap_interval, bootstrap_means, paired_bootstrap


def exact_distribution(values):
    """All n^n equally likely resamples of a small sample: their means, sorted."""
    return np.sort([sum(draw) / len(values) for draw in itertools.product(values, repeat=len(values))])


@pytest.mark.parametrize("values", [[0.1, 0.5, 0.7, 0.2, 1.0], [0, 0, 1, 1, 1], [0.0, 0.25, 0.25, 0.75]])
def test_resampled_means_follow_the_exact_distribution(values):
    exact, means = exact_distribution(values), bootstrap_means(values, samples=40_000)
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        value = np.quantile(exact, level, method="inverted_cdf") + 1e-9
        share = np.mean(exact <= value)
        assert np.mean(means <= value) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 40_000) + 1e-9)


def test_the_interval_of_a_small_sample_is_that_of_all_its_resamples():
    values = [0.1, 0.5, 0.7, 0.2, 1.0, 0.35]
    exact = np.quantile(exact_distribution(values), [0.025, 0.975])
    assert bootstrap_interval(values, samples=100_000) == pytest.approx(tuple(exact), abs=0.01)


def test_scores_of_0_and_1_follow_the_binomial_distribution():
    # 40 samples with two values use the multinomial draw; 30% ones.
    means = bootstrap_means([1] * 12 + [0] * 28, samples=40_000)
    counts = np.bincount(np.round(40 * means).astype(int), minlength=41) / 40_000
    binomial = np.array([math.comb(40, k) * 0.3**k * 0.7 ** (40 - k) for k in range(41)])
    assert np.abs(counts - binomial).max() < 4 * math.sqrt(0.25 / 40_000)


def test_mean_and_spread_of_many_values_are_the_closed_forms():
    values = np.random.default_rng(3).random(200)
    means = bootstrap_means(values, samples=20_000)
    assert means.mean() == pytest.approx(values.mean(), abs=4 * values.std() / math.sqrt(200 * 20_000))
    assert means.std() == pytest.approx(values.std() / math.sqrt(200), rel=0.03)


def test_the_interval_covers_the_mean_nearly_as_often_as_its_level():
    rng, inside = np.random.default_rng(5), 0
    for trial in range(400):
        low, high = bootstrap_interval(rng.random(40) ** 2, samples=600, seed=trial)
        inside += low <= 1 / 3 <= high
    assert 0.90 < inside / 400 < 0.98


def test_a_wider_level_gives_a_wider_interval():
    values = [0.1, 0.4, 0.9, 0.3, 0.6] * 4
    widths = [high - low for low, high in (bootstrap_interval(values, level=level) for level in (0.5, 0.9, 0.99))]
    assert widths[0] < widths[1] < widths[2]


def test_equal_arguments_give_equal_intervals_and_seeds_matter():
    values = list(np.random.default_rng(0).random(30))
    assert bootstrap_interval(values) == bootstrap_interval(tuple(values)) != bootstrap_interval(values, seed=1)


def test_the_block_size_changes_no_number(monkeypatch):
    values = list(np.random.default_rng(0).random(30))
    whole = bootstrap_means(values, samples=100)
    monkeypatch.setattr("memrl.evaluation.statistics._BLOCK", 210)
    assert np.array_equal(bootstrap_means(values, samples=100), whole)


def test_resamples_of_25600_values_fit_into_little_memory():
    values = np.random.default_rng(0).random(25_600)
    tracemalloc.start()
    try:
        bootstrap_means(values, samples=1_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * 2**20  # at once they would be 300 MiB, and ten times as many 3 GiB


def p_by_hand(differences):
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in signs_of(len(differences))]
    return sum(one >= abs(sum(differences)) - 1e-9 for one in sums) / len(sums)


def signs_of(count):
    return list(itertools.product((1, -1), repeat=count))


@pytest.mark.parametrize(
    "a, b",
    [
        ([1, 1, 1, 0], [0, 0, 1, 1]),
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ([0.5, 0.9, 0.1, 1.0, 0.3], [0.2, 0.4, 0.3, 0.8, 0.3]),
        ([0.7, 0.6, 0.3], [0.4, 0.3, 0.6]),  # 0.7 - 0.4 is not 0.3 in binary
        ([0.25, 0.5, 0.75, 1.0, 0.0, 0.25, 0.5], [0.0, 0.25, 1.0, 0.25, 0.75, 0.0, 0.75]),
    ],
)
def test_the_p_value_is_that_of_all_flips_of_signs(a, b):
    differences = [x - y for x, y in zip(a, b, strict=True)]
    assert paired_bootstrap(a, b).p_value == pytest.approx(p_by_hand(differences), abs=1e-12)


def test_with_scores_of_0_and_1_it_is_mcnemars_exact_test():
    # 12 gains, 2 losses: 2 P(Bin(14, 1/2) <= 2) = 2 (1 + 14 + 91) / 2^14, whatever the samples that both answer alike
    a, b = [1] * 12 + [0] * 2 + [1] * 986, [0] * 12 + [1] * 2 + [1] * 986
    assert paired_bootstrap(a, b).p_value == pytest.approx(2 * 106 / 2**14, rel=1e-9)


def test_differences_that_are_equal_but_for_rounding_count_as_equal():
    # 0.7 - 0.4, 0.6 - 0.3 and 1.0 - 0.7 are three numbers; all 200 samples gain 0.3, so p = 2 / 2^200, which no sampling reaches.
    a, b = [0.7, 0.6, 1.0, 0.9, 0.5] * 40, [0.4, 0.3, 0.7, 0.6, 0.2] * 40
    assert len({x - y for x, y in zip(a, b, strict=True)}) > 2
    assert paired_bootstrap(a, b).p_value == pytest.approx(2 / 2**200, rel=1e-9)


def test_sampled_and_enumerated_p_values_agree(monkeypatch):
    rng = np.random.default_rng(2)
    a, b = rng.random(14), rng.random(14) - 0.15
    exact = paired_bootstrap(a, b).p_value
    monkeypatch.setattr("memrl.evaluation.statistics._EXACT", 0)
    sampled = paired_bootstrap(a, b, samples=40_000).p_value
    assert sampled == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 40_000))
    assert sampled != exact


def test_a_sampled_p_value_is_never_zero():
    rng = np.random.default_rng(2)
    b = rng.random(200)
    assert paired_bootstrap(b + rng.random(200), b, samples=999).p_value == pytest.approx(1 / 1000)


def test_p_values_are_uniform_if_nothing_differs():
    rng = np.random.default_rng(8)
    p = np.array([paired_bootstrap(rng.random(30), rng.random(30), samples=400, seed=k).p_value for k in range(400)])
    for level in (0.05, 0.2, 0.5):
        assert np.mean(p <= level) == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / 400))


def test_equal_scores_have_no_difference():
    same = paired_bootstrap([0.3, 1.0, 0.0], [0.3, 1.0, 0.0])
    assert (same.mean, same.low, same.high, same.p_value, same.n) == (0.0, 0.0, 0.0, 1.0, 3)


def test_pairs_stay_together():
    # Hard and easy samples: the scores vary a lot, the differences not at all.
    b = [0.0, 0.5] * 50
    result = paired_bootstrap([value + 0.25 for value in b], b)
    assert (result.mean, result.low, result.high) == pytest.approx((0.25, 0.25, 0.25))
    assert result.p_value < 1e-20


def test_exchanging_the_two_changes_only_the_sign():
    rng = np.random.default_rng(4)
    a, b = rng.random(12), rng.random(12)
    one, other = paired_bootstrap(a, b), paired_bootstrap(b, a)
    assert (one.mean, one.p_value) == pytest.approx((-other.mean, other.p_value))


@pytest.mark.parametrize("values", [[], [0.1, math.nan], [math.inf], [[0.1], [0.2]]])
def test_no_values_and_values_that_are_not_finite_are_refused(values):
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval(values)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="2 values cannot be paired with 1"):
        paired_bootstrap([0, 1], [0])
    with pytest.raises(ValueError, match="level is 95"):
        bootstrap_interval([0, 1], level=95)
    with pytest.raises(ValueError, match="samples is 0"):
        bootstrap_interval([0, 1], samples=0)
