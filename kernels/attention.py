"""Causal attention, over packed sequences (training, prefill) and over a cache (decoding).

Neither ever sees a padding token: the first works on the sequences' own lengths, the second masks what lies behind each row's
length. Scores are softmax(q k^T / sqrt(D)); with grouped queries, heads h*H/K .. (h+1)*H/K - 1 share key/value head h.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(q: Tensor, k: Tensor, v: Tensor, seq_lens: Sequence[int]) -> Tensor:
    """Causal attention within each of the sequences that lie end to end in the packed tensors.

    Neighbours of equal length go through one batched call, so a caller who sorts by length gets few calls and no padding.

    Args:
        q: [T, H, D]; k, v: [T, K, D].
        seq_lens: lengths in packing order, sum T.

    Returns:
        [T, H, D].
    """
    num_groups = q.shape[1] // k.shape[1]
    outputs, start = [], 0
    for length, run in groupby(seq_lens):
        count = sum(1 for _ in run)
        end = start + count * length
        heads = (t[start:end].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=num_groups > 1)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = end
    assert start == q.shape[0], f"seq_lens add up to {start}, but {q.shape[0]} tokens were packed"
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
    """One query per row against that row's cached keys.

    Query heads that share a key/value head are folded into the query length, so the cache is read once and never repeated.

    Args:
        q: [B, H, D].
        k_cache, v_cache: [B, K, S, D].
        mask: bool [B, S], True where the row's own positions are.

    Returns:
        [B, H, D].
    """
    num_rows, _, head_size = q.shape
    folded = q.view(num_rows, k_cache.shape[1], -1, head_size)  # (B, K, H/K, D)
    out = F.scaled_dot_product_attention(folded, k_cache, v_cache, attn_mask=mask[:, None, None, :])
    return out.reshape(q.shape)
