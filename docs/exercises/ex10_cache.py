"""Exercise 10: the cache of keys and values."""

import torch
from torch import Tensor


def decode(q: Tensor, k: Tensor, v: Tensor, prompt_len: int, speeds: Tensor) -> Tensor:
    """Attention outputs [T - prompt_len, D] of the response's tokens, computed one after the other with a cache.

    They equal those of one pass over all tokens: softmax(q k / sqrt(D)) v, each token over those up to itself, q and k rotated by
    their positions (RoPE, arXiv 2104.09864). The first token of the prompt has position 0.

    Args:
        q, k, v: [T, D] of one head, not rotated yet; of prompt and response.
        speeds: [D / 2], radians per position.
    """
    num_tokens, head_size = q.shape
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    keys[:prompt_len] = rotate(k[:prompt_len], torch.arange(prompt_len), speeds)
    values[:prompt_len] = v[:prompt_len]
    outputs = []
    for slot in range(prompt_len, num_tokens):
        position = torch.tensor([slot + 1])
        keys[slot] = rotate(k[slot : slot + 1], position, speeds)[0]
        values[slot] = v[slot]
        scores = rotate(q[slot : slot + 1], position, speeds) @ keys[: slot + 1].T / head_size**0.5
        outputs.append(scores.softmax(dim=-1) @ values[: slot + 1])
    return torch.cat(outputs)


def rotate(x: Tensor, positions: Tensor, speeds: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by position times speed. This function is right."""
    angles = positions[:, None] * speeds
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1)
