"""Confidence intervals of mean scores, and paired comparisons of two models on the same samples.

Values of 0 or 1 have intervals in closed form, with a width above 0 even if all values are equal. Others (f1, RULER's score,
means over repeats) are resampled; the bootstrap interval of n equal values has width 0, however small n is.

The unit is the sample. Repeated readings of one sample are averaged first: they show how the answers to one question vary, not
how the model would score on other questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Z_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution
_BLOCK = 2**22  # numbers drawn at a time: 32 MiB
_EXACT = 2**16  # permutation distributions of up to this many points are enumerated, larger ones are sampled


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over n samples, its confidence interval, and the two-sided p-value of "there is no difference"."""

    mean: float
    low: float
    high: float
    p_value: float
    n: int


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson, JASA 22, 1927).

    With p = successes / trials, n = trials and z = 1.96:

        (p + z^2 / 2n  -+  z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p -+ z * sqrt(p * (1 - p) / n) it stays within [0, 1], has a width above 0 at 0 or n successes, and keeps its coverage
    for small n (Brown, Cai and DasGupta, Statistical Science 16, 2001).

    Raises:
        ValueError: impossible counts.

    >>> [round(bound, 4) for bound in wilson_interval(81, 263)]
    [0.2553, 0.3662]
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials have no interval")
    p, n, z = successes / trials, trials, Z_95
    centre = p + z * z / (2 * n)
    margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends the exact bound is 0 or 1, which rounding misses by 1e-17.
    low = 0.0 if successes == 0 else (centre - margin) / scale
    high = 1.0 if successes == trials else (centre + margin) / scale
    return low, high


def paired_interval(gains: int, losses: int, n: int) -> tuple[float, float]:
    """95% confidence interval of the difference of two proportions over the same n samples.

    Only the samples that the two answer differently carry information. With b gains, c losses, half a sample added to each of
    the four cells and m = n + 2 (Agresti and Min, Statistics in Medicine 24, 2005):

        (b - c) / m  -+  z sqrt(b + c + 1 - (b - c)^2 / m) / m

    Unlike the bootstrap and the plain Wald interval it has a width above 0 if both answer every sample alike.

    Raises:
        ValueError: impossible counts.

    >>> [round(bound, 4) for bound in paired_interval(12, 2, 100)]
    [0.0261, 0.17]
    """
    if n < 1 or gains < 0 or losses < 0 or gains + losses > n:
        raise ValueError(f"{gains} gains and {losses} losses in {n} samples have no interval")
    m, difference = n + 2, gains - losses
    margin = Z_95 * math.sqrt(gains + losses + 1 - difference * difference / m) / m
    return max(-1.0, difference / m - margin), min(1.0, difference / m + margin)


def bootstrap_interval(values: ArrayLike, samples: int = 10_000, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a mean (Efron, Annals of Statistics 7, 1979; Efron and Tibshirani 1993, chapter 13).

    The quantiles at (1 - level) / 2 and (1 + level) / 2 of the means of `samples` draws of n values with replacement. For small
    n the coverage is a little below `level`: the width is sqrt((n - 1) / n) of the one for a known variance, less than Student's.

    Raises:
        ValueError: no values, one that is not finite, or a level outside of (0, 1).
    """
    return _interval(bootstrap_means(values, samples, seed), level)


def score_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean score: Wilson's if each value is 0 or 1, else the bootstrap's.

    A single value between 0 and 1 carries no information about the variance, so its interval is all of [0, 1].
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(math.fsum(values), len(values))
    return bootstrap_interval(values) if len(values) > 1 else (0.0, 1.0)


def bootstrap_means(values: ArrayLike, samples: int = 10_000, seed: int = 0) -> np.ndarray:
    """Means of `samples` draws of n of the n values with replacement, float64 [samples]; a function of the arguments alone.

    With few distinct values, as for scores of 0 and 1, one multinomial draw of how often each occurs replaces the n draws.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    array = _checked(values, samples)
    rng, n = np.random.default_rng(seed), len(array)
    distinct, counts = np.unique(array, return_counts=True)
    means = np.empty(samples)
    is_few = 8 * len(distinct) <= n  # a binomial number costs about as much as eight indices
    block = max(1, _BLOCK // (len(distinct) if is_few else n))
    for begin in range(0, samples, block):
        size = min(block, samples - begin)
        if is_few:
            means[begin : begin + size] = rng.multinomial(n, counts / n, size) @ distinct / n
        else:
            means[begin : begin + size] = array[rng.integers(n, size=(size, n), dtype=np.int32)].mean(axis=1)
    return means


def paired_bootstrap(a: ArrayLike, b: ArrayLike, samples: int = 10_000, seed: int = 0, level: float = 0.95) -> Difference:
    """Compare `a` with `b` sample by sample: the bootstrap interval of the mean difference, and a permutation p-value.

    With d_i = a_i - b_i the interval is `bootstrap_interval` of d: pairs are drawn, never a and b apart, because a question
    that is hard for one model is hard for the other (Dror et al., ACL 2018). The p-value is that of the sign-flip test
    (Fisher 1935; Good, Permutation, Parametric and Bootstrap Tests of Hypotheses, 2005): if the two do not differ, each d_i
    is as likely as -d_i, so

        p = P(|sum s_i d_i| >= |sum d_i|),  s_i = -1 or +1, each with probability 1/2

    It is exact if d takes so few values that all sums can be listed: up to 16 samples with any values, and any number of
    samples with scores of 0 and 1, for which it is McNemar's exact test. Else it is (hits + 1) / (samples + 1) over `samples`
    random flips, which never rejects too often (Phipson and Smyth 2010).

    Raises:
        ValueError: no samples, a and b of different lengths, or a value that is not finite.
    """
    first, second = np.asarray(a), np.asarray(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}; give both for the same samples")
    differences = _checked(first, samples) - _checked(second, samples)
    low, high = _interval(bootstrap_means(differences, samples, seed), level)
    return Difference(float(differences.mean()), low, high, _sign_flip_p(differences, samples, seed), len(differences))


def _sign_flip_p(differences: np.ndarray, samples: int, seed: int) -> float:
    # Rounded, so that 0.7 - 0.4 and 0.3 count as equal; zeros add nothing with either sign.
    rounded = np.round(differences[differences != 0], 12)
    sizes, counts = np.unique(np.abs(rounded), return_counts=True)
    observed = abs(rounded.sum())
    least = observed - 1e-9 * max(1.0, np.abs(rounded).sum())  # sums in another order differ by rounding
    if math.prod(int(count) + 1 for count in counts) <= _EXACT:
        sums, chances = np.zeros(1), np.ones(1)
        for size, count in zip(sizes, counts, strict=True):
            ups = np.arange(count + 1)  # how many of this size are added; the others are subtracted
            sums = np.add.outer(sums, size * (2 * ups - count)).ravel()
            # Probabilities of 0 to count heads of fair coins: C(count, k) / 2^count.
            factorials = np.array([math.lgamma(up + 1) for up in ups])
            coins = np.exp(factorials[-1] - factorials - factorials[::-1] - int(count) * math.log(2))
            chances = np.multiply.outer(chances, coins).ravel()
        return min(1.0, float(chances[np.abs(sums) >= least].sum()))
    rng, hits = np.random.default_rng(seed), 0
    block = max(1, _BLOCK // len(sizes))
    for begin in range(0, samples, block):
        ups = rng.binomial(counts, 0.5, size=(min(block, samples - begin), len(sizes)))
        hits += int((np.abs((2 * ups - counts) @ sizes) >= least).sum())
    return (hits + 1) / (samples + 1)


def _interval(means: np.ndarray, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, like 0.95")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _checked(values: ArrayLike, samples: int) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError("a mean needs at least one value, and all of them finite")
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1")
    return array
