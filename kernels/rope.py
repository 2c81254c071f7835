"""Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of every head by their position's angles.

    Args:
        x: queries or keys, [T, heads, D].
        cos, sin: [T, D], x's dtype; the D/2 values of each position are repeated once.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
