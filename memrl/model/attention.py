"""What a forward pass attends to.

The model itself knows only packed tokens. Which of them see each other is the *context*'s business, and that is the one thing
that differs between training, prefill and decoding (the latter two live in `memrl.sampler.kv_cache`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels import packed_attention


class AttentionContext(Protocol):
    """positions: int64 [T], each token's place in its own sequence."""

    positions: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [T, H, D] for q [T, H, D], k and v [T, K, D] of one layer, rotary embedding already applied."""
        ...


class PackedContext:
    """Whole sequences, end to end, each of which sees only itself."""

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu"):
        self.seq_lens = list(seq_lens)
        self.positions = packed_positions(self.seq_lens, device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, self.seq_lens)


def packed_positions(seq_lens: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """0 .. length-1 for every sequence, end to end: int64 [sum of seq_lens].

    >>> packed_positions([3, 2]).tolist()
    [0, 1, 2, 0, 1]
    """
    lens = torch.tensor(seq_lens)
    starts = lens.cumsum(0) - lens
    return (torch.arange(int(lens.sum())) - starts.repeat_interleave(lens)).to(device)
