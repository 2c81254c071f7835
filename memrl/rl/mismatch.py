"""Measure and correct the mismatch of sampler and trainer: both compute the same log-probabilities, with different rounding."""

import math

import torch
from torch import Tensor

from memrl.rl.aggregation import turn_mean
from memrl.rl.loss import MAX_LOG_RATIO

CORRECTIONS = ("truncate", "mask")


@torch.no_grad()
def correction(trainer_logprobs: Tensor, sampler_logprobs: Tensor, turn_index: Tensor, mode: str, bound: float) -> Tensor:
    """Weights for the policy gradient of sampled tokens, fp32 [T], without gradient.

        d_t       = trainer_logprob_t - sampler_logprob_t
        truncate    min(exp(d_t), bound)                                     truncated importance sampling
        mask        1 where 1/bound <= exp(mean of d over the turn) <= bound, else 0 for the whole turn

    `truncate` bounds the variance of the weights at the price of some bias (Ionides, "Truncated importance sampling", 2008; for
    sampler and trainer: fengyao.notion.site/off-policy-rl). `mask` drops whole turns by the geometric mean of their ratios, which
    does not drift with length as the product of the ratios does (richardli.xyz/rl-collapse-3).

    Args:
        trainer_logprobs: fp32 [T], of the policy that sampled, computed by the trainer.
        sampler_logprobs: fp32 [T], of the same policy, computed by the sampler.
        turn_index: int64 [T], 0..n-1; every turn lies wholly within the batch.
        bound: at least 1.

    Raises ValueError for an unknown mode, or a bound below 1.
    """
    if mode not in CORRECTIONS:
        raise ValueError(f"mismatch is {mode!r}; it must be one of {', '.join(CORRECTIONS)}")
    if not bound >= 1:
        raise ValueError(f"mismatch_bound is {bound}; it must be at least 1")
    d = trainer_logprobs.double() - sampler_logprobs.double()
    if mode == "truncate":
        return d.exp().clamp(max=bound).float()
    return (turn_mean(d, turn_index).abs() <= math.log(bound)).float()


@torch.no_grad()
def mismatch_metrics(trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, Tensor]:
    """Sums over the T tokens, fp64, without gradient; both inputs fp32 [T].

    mismatch_kl   exp(d) - d - 1, d = trainer - sampler: k3 of KL(sampler || trainer), joschu.net/blog/kl-approx.html
    logprob_diff  |d|
    """
    d = trainer_logprobs.double() - sampler_logprobs.double()
    cut = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {"mismatch_kl": (cut.expm1() - cut).sum(), "logprob_diff": d.abs().sum()}
