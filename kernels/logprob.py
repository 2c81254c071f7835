"""Log-probability of given tokens without holding [tokens, vocabulary] at once."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 64 * 1024 * 1024  # fp32 logits held at once: 256 MiB


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of the same distribution, in fp32.

    Rows are taken in chunks, and a chunk's logits are computed again in the backward pass. With one chunk there is nothing to
    save, so nothing is computed twice.

    Args:
        hidden: [N, C].
        weight: [V, C].
        targets: int64 [N].

    Returns:
        log-probabilities [N], with gradient, and entropies [N] in nats, without.
    """
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    if hidden.shape[0] <= rows:
        return _chunk_logprobs(hidden, weight, targets, temperature)
    chunks = [
        checkpoint(_chunk_logprobs, h, weight, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (F.linear(hidden, weight).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy
