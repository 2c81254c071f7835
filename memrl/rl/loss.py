"""The policy loss over packed response tokens. Prompts and padding are left out, so every [T] holds response tokens only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memrl.rl.aggregation import turn_mean

MAX_LOG_RATIO = 20.0  # exp(20) is far beyond every clip bound; more would overflow to inf and then to NaN
MAX_KL_LOG_RATIO = 10.0  # as the original: beyond it one token's penalty would outweigh the whole step
LOSSES = ("ppo", "cispo", "gspo", "reinforce")


@dataclass(frozen=True)
class LossOptions:
    """The settings of `policy_loss`."""

    kind: str = "ppo"  # one of LOSSES
    clip_low: float = 0.2  # the ratio's bounds are 1 - clip_low and 1 + clip_high; cispo uses the upper one only
    clip_high: float = 0.2
    dual_clip: float | None = 3.0  # bound on -pg_t / A_t for negative advantages, above 1; None turns it off. For ppo and gspo
    kl_coef: float = 0.001  # weight of the penalty to the reference
    kl_estimator: str = "k3"  # one of KL_ESTIMATORS
    entropy_coef: float = 0.0  # weight of the entropy bonus


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    options: LossOptions,
    *,
    weights: Tensor,
    ref_logprobs: Tensor | None = None,
    turn_index: Tensor | None = None,
    entropies: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy gradient loss with a penalty to the reference and an entropy bonus.

        loss   = sum_t w_t (correction_t pg_t + kl_coef kl_t - entropy_coef H_t)
        rho_t  = exp(logprob_t - old_logprob_t)
        pg_t     ppo        PPO-clip of rho_t with two bounds and dual clip    see `clipped_surrogate`
                 gspo       the same, with the turn's ratio for rho_t          see `turn_ratio`
                 cispo      -sg(min(rho_t, 1 + clip_high)) A_t logprob_t       see `clipped_weight`
                 reinforce  -A_t logprob_t                                     Williams 1992; no ratio, so correct on policy only
        kl_t     k1, k2 or k3, which differ in value and gradient              see `k1`, `k2`, `k3`

    sg is the stop-gradient. The weights already hold the denominator of the whole optimizer step (`memrl/rl/aggregation.py`), so
    the sum of the gradients over micro-batches and ranks does not depend on how the step was divided.

    Args:
        logprobs: fp32 [T], with gradient: the policy now.
        old_logprobs: fp32 [T]: the policy that sampled.
        advantages: fp32 [T]: the turn's share of its trajectory's advantage.
        weights: fp32 [T], w_t.
        ref_logprobs: fp32 [T]: the frozen reference; None leaves out the KL term.
        turn_index: int64 [T], the turn of each token, 0..n-1, every turn wholly within the batch; for gspo.
        entropies: fp32 [T], with gradient, nats: of the distribution that each token was drawn from; for the bonus.
        correction: fp32 [T], weights against the mismatch of sampler and trainer (`memrl/rl/mismatch.py`).

    Returns:
        The loss, and metrics as fp64 sums over the T tokens (divide by the step's token count, after summing over ranks):
        pg_loss (corrected), approx_kl (k3 of KL(old || now) by tokens: how far the updates have moved), ratio (the one in the
        loss: the turn's for gspo), clip_frac (not reinforce: tokens whose clip took effect), dual_clip_frac (ppo, gspo), and kl
        with a reference.

    Raises ValueError for an unknown kind or estimator, a tensor of another shape, or a missing input that the options need.
    """
    per_token = {"weights": weights, "entropies": entropies, "correction": correction, "turn_index": turn_index}
    per_token |= {"old_logprobs": old_logprobs, "advantages": advantages, "ref_logprobs": ref_logprobs}
    _check_shapes(logprobs, per_token)

    pg, metrics = policy_gradient(logprobs, old_logprobs, advantages, turn_index, options)
    pg = pg if correction is None else correction.detach() * pg
    metrics["pg_loss"] = pg
    loss = (weights * pg).sum()
    if ref_logprobs is not None:
        metrics["kl"] = kl = estimate_kl(options.kl_estimator, logprobs, ref_logprobs)
        loss = loss + options.kl_coef * (weights * kl).sum()
    if options.entropy_coef:
        if entropies is None:
            raise ValueError(f"entropy_coef is {options.entropy_coef}, but entropies were not given; give them, or set it to 0")
        loss = loss - options.entropy_coef * (weights * entropies).sum()
    return loss, {name: values.detach().sum().double() for name, values in metrics.items()}


def policy_gradient(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, turn_index: Tensor | None, options: LossOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """The term pg_t of `policy_loss`, [T], and its metrics per token."""
    difference = logprobs - old_logprobs
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    metrics = {"approx_kl": ratio - 1 - log_ratio, "ratio": ratio}
    if options.kind == "reinforce":
        return -advantages * logprobs, metrics
    if options.kind == "cispo":
        pg, clipped = clipped_weight(ratio, advantages, logprobs, options.clip_high)
        return pg, metrics | {"clip_frac": clipped}
    if options.kind not in LOSSES:
        raise ValueError(f"loss is {options.kind!r}; it must be one of {', '.join(LOSSES)}")
    if options.kind == "gspo":
        metrics["ratio"] = ratio = turn_ratio(difference, turn_index)
    pg, clipped, dual_clipped = clipped_surrogate(ratio, advantages, options)
    return pg, metrics | {"clip_frac": clipped, "dual_clip_frac": dual_clipped}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """PPO-clip with clip-higher and dual clip, [T]; also where each of the two clips took effect, bool [T].

        pg_t = max(-A_t rho_t, -A_t clip(rho_t, 1 - clip_low, 1 + clip_high))    PPO, arXiv 1707.06347, eq. 7
        pg_t = min(pg_t, -dual_clip A_t)  where A_t < 0                          dual clip, arXiv 1912.09729, eq. 8

    Separate bounds for the ratio are DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    pg = torch.maximum(unclipped, clipped)
    dual_clipped = torch.zeros_like(pg, dtype=torch.bool)
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantages
        dual_clipped = (advantages < 0) & (pg > bound)
        pg = torch.where(dual_clipped, bound, pg)
    return pg, clipped > unclipped, dual_clipped


def turn_ratio(difference: Tensor, turn_index: Tensor | None) -> Tensor:
    """The ratio of each token's turn, [T]: the geometric mean of its tokens' ratios; the gradient flows through the mean.

        s = exp(mean over the turn of logprob_t - old_logprob_t)    GSPO, arXiv 2507.18071, eq. 7

    With aggregation seq_mean a turn's tokens add up to one clipped surrogate of s: eq. 5 of that paper.
    """
    if turn_index is None:
        raise ValueError("loss gspo needs turn_index, the turn that each token belongs to")
    return turn_mean(difference, turn_index).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_weight(ratio: Tensor, advantages: Tensor, logprobs: Tensor, clip_high: float) -> tuple[Tensor, Tensor]:
    """REINFORCE weighted by the clipped ratio, [T]: every token keeps a gradient. Also where it was clipped, bool [T].

    pg_t = -sg(min(rho_t, 1 + clip_high)) A_t logprob_t    CISPO, arXiv 2506.13585, section 3.1, without a lower bound
    """
    return -ratio.detach().clamp(max=1 + clip_high) * advantages * logprobs, ratio > 1 + clip_high


def estimate_kl(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The penalty per token, [T]; `estimator` is k1, k2 or k3 of joschu.net/blog/kl-approx.html.

    Training feels a penalty's gradient, not its value, and the expected gradient of an estimate need not be the gradient of what
    it estimates (arXiv 2510.01555). The KL here is that of the next token at each position of the response. The expectations
    stated below are over tokens sampled from the policy itself: exact in the first update on a batch, less so as the ratio moves.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator is {estimator!r}; it must be one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](logprobs, ref_logprobs)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Value d = logprob - ref_logprob, unbiased for KL(policy || reference); gradient sg(d) grad logprob.

    The plain derivative of d is grad logprob, which is 0 in expectation. The gradient of the KL, sum_x p(x) d(x), is
    E[d grad logprob] + E[grad logprob]; its first part is kept, as if the estimate were a reward.
    """
    d = (logprobs - ref_logprobs).detach()
    return d + d * (logprobs - logprobs.detach())


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(logprob - ref_logprob)^2 / 2: its value is biased, but its gradient is k1's on every token, that of KL(policy || ref)."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref_logprob - logprob cut to [-10, 10]: unbiased for KL(policy || reference), never negative.

    Differentiated as written, as in the original and in GRPO (arXiv 2402.03300, eq. 4). Its gradient (1 - exp(d)) grad logprob
    is in expectation that of the other direction, KL(reference || policy); near the reference the two agree to first order.
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)
    return d.exp() - d - 1


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def _check_shapes(logprobs: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, values in others.items():
        # Broadcasting over a stray dimension would silently make a loss of T x T terms.
        if values is not None and (values.shape != logprobs.shape or values.dim() != 1):
            raise ValueError(f"{name} {tuple(values.shape)} and logprobs {tuple(logprobs.shape)} must be equal and flat")
