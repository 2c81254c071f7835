"""How certain is a mean score, and is one model better than another on the same samples?

Four functions share this work, and each is right somewhere; `score_interval` chooses between the first two:

    wilson_interval (summary.py)           the values are 0 or 1 and each sample was read once
    bootstrap_interval (here)              the values are fractions: f1, RULER's score, means over repeats
    paired_interval (ablation_table.py)    differences of 0 or 1 over the same samples
    paired_bootstrap (here)                differences of any values over the same samples, and the p-value of all of them

The first and the third are closed forms that do not become empty where all values are equal. A bootstrap of n equal values
has no width, however small n is: it knows nothing that the sample does not show.

The unit is the sample. Readings of one sample again and again (repeats) are averaged first: they say how a model's answers
to one question vary, not how it would do on other questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK = 2**22  # numbers drawn at a time: 32 MiB
_EXACT = 2**16  # a permutation distribution of so many points is enumerated instead of sampled


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over n samples, its confidence interval, and the two-sided p-value of "there is no difference"."""

    mean: float
    low: float
    high: float
    p_value: float
    n: int


def bootstrap_interval(values: Sequence[float], samples: int = 10_000, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a mean (Efron, Annals of Statistics 7, 1979; Efron and Tibshirani 1993, chapter 13).

    Of the means of `samples` draws of n values with replacement, the quantiles at (1 - level) / 2 and (1 + level) / 2.
    It covers a little less than it promises for small n: of a normal sample of n, sqrt((n - 1) / n) of the width that a
    known variance would give, and less than Student's.

    Raises:
        ValueError: no values, one that is not finite, or a level outside of (0, 1).
    """
    return _interval(bootstrap_means(values, samples, seed), level)


def score_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean score: Wilson's where each value is 0 or 1, else the bootstrap's.

    One value between 0 and 1 says nothing about how values vary, so its interval is all of [0, 1].
    """
    # summary.py imports this module.
    from memrl.evaluation.summary import wilson_interval

    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(math.fsum(values), len(values))
    return bootstrap_interval(values) if len(values) > 1 else (0.0, 1.0)


def bootstrap_means(values: Sequence[float], samples: int = 10_000, seed: int = 0) -> np.ndarray:
    """Means of `samples` draws of n of the n values with replacement, float64 [samples]; a function of the arguments alone.

    Where few values differ, as for scores of 0 and 1, how often each is drawn is drawn at once (a multinomial): the same
    distribution without its n draws.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    values = _checked(values, samples)
    rng, n = np.random.default_rng(seed), len(values)
    distinct, counts = np.unique(values, return_counts=True)
    means = np.empty(samples)
    is_few = 8 * len(distinct) <= n  # a binomial number costs about as much as eight indices
    block = max(1, _BLOCK // (len(distinct) if is_few else n))
    for begin in range(0, samples, block):
        size = min(block, samples - begin)
        if is_few:
            means[begin : begin + size] = rng.multinomial(n, counts / n, size) @ distinct / n
        else:
            means[begin : begin + size] = values[rng.integers(n, size=(size, n), dtype=np.int32)].mean(axis=1)
    return means


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], samples: int = 10_000, seed: int = 0, level: float = 0.95
) -> Difference:
    """Is `a` better than `b`, sample by sample? The bootstrap interval of the mean difference, and a permutation p-value.

    With d_i = a_i - b_i the interval is `bootstrap_interval` of d: pairs are drawn, never a and b apart, because a question
    that is hard for one model is hard for the other (Dror et al., ACL 2018). The p-value is that of the sign-flip test
    (Fisher 1935; Good, Permutation, Parametric and Bootstrap Tests of Hypotheses, 2005): if the two do not differ, each d_i
    is as likely as -d_i, so

        p = P(|sum s_i d_i| >= |sum d_i|),  s_i = -1 or +1, each with probability 1/2

    It is exact where d takes so few values that all sums can be listed: up to 16 samples with any values, and any number of
    samples with scores of 0 and 1, where it is McNemar's exact test. Else it is (hits + 1) / (samples + 1) over `samples`
    random flips, which never rejects too often (Phipson and Smyth 2010).

    Raises:
        ValueError: no samples, a and b of different lengths, or a value that is not finite.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}; give both for the same samples")
    differences = _checked(a, samples) - _checked(b, samples)
    low, high = _interval(bootstrap_means(differences, samples, seed), level)
    return Difference(float(differences.mean()), low, high, _sign_flip_p(differences, samples, seed), len(differences))


def _sign_flip_p(differences: np.ndarray, samples: int, seed: int) -> float:
    # Rounded, so that 0.7 - 0.4 and 0.3 are one size; zeros keep their sum whatever their sign.
    rounded = np.round(differences[differences != 0], 12)
    sizes, counts = np.unique(np.abs(rounded), return_counts=True)
    observed = abs(rounded.sum())
    least = observed - 1e-9 * max(1.0, np.abs(rounded).sum())  # sums in another order differ by rounding
    if math.prod(int(count) + 1 for count in counts) <= _EXACT:
        sums, chances = np.zeros(1), np.ones(1)
        for size, count in zip(sizes, counts, strict=True):
            ups = np.arange(count + 1)  # how many of this size are added; the others are subtracted
            sums = np.add.outer(sums, size * (2 * ups - count)).ravel()
            chances = np.multiply.outer(chances, _fair_coins(int(count))).ravel()
        return min(1.0, float(chances[np.abs(sums) >= least].sum()))
    rng, hits = np.random.default_rng(seed), 0
    block = max(1, _BLOCK // len(sizes))
    for begin in range(0, samples, block):
        ups = rng.binomial(counts, 0.5, size=(min(block, samples - begin), len(sizes)))
        hits += int((np.abs((2 * ups - counts) @ sizes) >= least).sum())
    return (hits + 1) / (samples + 1)


def _fair_coins(count: int) -> np.ndarray:
    """Probabilities of 0 to `count` heads, float64 [count + 1]: C(count, k) / 2^count."""
    factorials = np.array([math.lgamma(k + 1) for k in range(count + 1)])
    return np.exp(factorials[-1] - factorials - factorials[::-1] - count * math.log(2))


def _interval(means: np.ndarray, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, like 0.95")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _checked(values: Sequence[float], samples: int) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError("a mean needs at least one value, and all of them finite")
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1")
    return array
