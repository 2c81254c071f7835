"""Log-probability of given tokens without holding [tokens, vocabulary] at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 32 * 1024 * 1024  # fp32 logits held at once: 128 MiB


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of the same distribution, in fp32.

    Rows are taken in chunks. Only hidden states and log-sum-exps are kept for the backward pass, which computes each chunk's
    logits again.

    Args:
        hidden: [N, C].
        weight: [V, C], hidden's dtype.
        targets: int64 [N].

    Returns:
        log-probabilities [N], with gradient, and entropies [N] in nats, without.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """With z = h W^T / temperature and p = softmax(z):

    log p        = z - logsumexp(z)
    entropy      = -sum_v p_v log p_v
    d log p_target / dz = onehot(target) - p
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        parts = []
        for h, t in _chunks(weight, hidden, targets):
            z = _scaled_logits(h, weight, temperature)
            lse = z.logsumexp(-1)
            log_p = z.sub_(lse[:, None])
            entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
            parts.append((log_p.gather(-1, t[:, None]).squeeze(-1), entropy, lse))
        logprobs, entropies, lses = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, lses)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        hidden, weight, targets, lses = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # fp32, so that the sum over chunks does not depend on how many there are.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        start = 0
        for h, t, lse, grad in _chunks(weight, hidden, targets, lses, grad_logprobs):
            grad_z = _scaled_logits(h, weight, ctx.temperature).sub_(lse[:, None]).exp_().mul_(-grad[:, None])
            grad_z.scatter_add_(-1, t[:, None], grad[:, None])
            grad_z = grad_z.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_z, weight, out=grad_hidden[start : start + len(h)])
            if grad_weight is not None:
                grad_weight += grad_z.t() @ h
            start += len(h)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return F.linear(hidden, weight).float().div_(temperature)


def _chunks(weight: Tensor, *tensors: Tensor):
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
