"""The layer's elementwise operations, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    The statistics are fp32 for every dtype of x; the product with the weight is in x's dtype, as Qwen2 was trained.
    x [..., C], weight [C].
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of every head by their position's angles (Su et al., arXiv 2104.09864).

    Args:
        x: queries or keys, [T, heads, D], in the half-split layout of Hugging Face checkpoints.
        cos, sin: [T, D], x's dtype; the D/2 values of each position are repeated once.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., feed-forward size] (Shazeer, arXiv 2002.05202)."""
    return F.silu(gate) * up
