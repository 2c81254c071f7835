"""The policy loss over packed response tokens. Prompts do not appear here, and neither does padding: every [T] is real."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far beyond every clip bound; more would overflow to inf and then to NaN
MAX_KL_LOG_RATIO = 10.0  # as the original: beyond it one token's penalty would outweigh the whole step


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    num_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    kl_coef: float = 0.001,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip with clip-higher and dual clip, plus a k3 penalty to the reference.

        rho_t  = exp(logprob_t - old_logprob_t)
        pg_t   = max(-A_t rho_t, -A_t clip(rho_t, 1 - clip_low, 1 + clip_high))   PPO, arXiv 1707.06347, eq. 7
        pg_t   = min(pg_t, -dual_clip A_t)  where A_t < 0                         dual clip, arXiv 1912.09729, eq. 8
        kl_t   = exp(d_t) - d_t - 1,  d_t = ref_logprob_t - logprob_t             k3, joschu.net/blog/kl-approx.html
        loss   = sum_t (pg_t + kl_coef kl_t) / num_tokens                         token mean, DAPO, arXiv 2503.14476, eq. 8

    Separate bounds for the ratio are DAPO's clip-higher. `num_tokens` counts the response tokens of the whole optimizer step,
    over all micro-batches and ranks, so the summed gradients do not depend on how the step was cut.

    Args:
        logprobs: fp32 [T], with gradient: the policy now.
        old_logprobs: fp32 [T]: the policy that sampled.
        advantages: fp32 [T]: each token's trajectory's advantage.
        ref_logprobs: fp32 [T]: the frozen reference; None leaves the KL term out.
        dual_clip: bound on -pg_t / A_t for negative advantages, above 1; None turns it off.

    Returns:
        The loss, and metrics as sums over the T tokens (divide by the step's token count, after summing over ranks).
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    pg = torch.maximum(unclipped, clipped)
    dual_clipped = torch.zeros_like(pg, dtype=torch.bool)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (pg > bound)
        pg = torch.where(dual_clipped, bound, pg)
    loss = pg.sum()
    metrics = {
        "pg_loss": pg.sum(),
        "clip_frac": (clipped > unclipped).sum(),
        "dual_clip_frac": dual_clipped.sum(),
        "approx_kl": (ratio - 1 - log_ratio).sum(),  # k3 of KL(old || now): how far the updates have moved
        "ratio": ratio.sum(),
    }
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
        loss = loss + kl_coef * kl.sum()
        metrics["kl"] = kl.sum()
    return loss / num_tokens, {name: value.detach().double() for name, value in metrics.items()}


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token; never negative.

    exp(d) - d - 1 with d = ref_logprob - logprob, cut to [-10, 10].
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)
    return d.exp() - d - 1
