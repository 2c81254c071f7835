"""Attention contexts: which tokens of a forward pass attend to which.

The model itself processes packed tokens. Only the *context* differs between training (`PackedContext`), prefill and decoding
(both in `memrl.sampler.kv_cache`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from memrl.kernels.attention import AttentionBackend, SdpaAttention


class AttentionContext(Protocol):
    """positions: int64 [T], each token's position in its own sequence."""

    positions: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [T, H, D] for q [T, H, D], k and v [T, K, D] of one layer, rotary embedding already applied."""
        ...


class PackedContext:
    """Whole sequences, packed end to end, each attending only to itself; `attention` None uses PyTorch's own."""

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu", attention: AttentionBackend | None = None):
        self.positions = packed_positions(seq_lens, device)
        self.attention = attention or SdpaAttention()
        self.plan = self.attention.plan_packed(seq_lens, device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.packed(q, k, v, self.plan)


def packed_positions(seq_lens: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """0 .. length-1 for every sequence, end to end: int64 [sum of seq_lens].

    >>> packed_positions([3, 2]).tolist()
    [0, 1, 2, 0, 1]
    """
    lens = torch.tensor(seq_lens)
    starts = lens.cumsum(0) - lens
    return (torch.arange(int(lens.sum())) - starts.repeat_interleave(lens)).to(device)
